"""What cannot be served is refused before Ray starts, with the reason and what to change."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.checkpoint_check import check_checkpoint
from coatcheck.cluster.config import ServeConfig
from coatcheck.cluster.machine_check import check_gpus
from coatcheck.cluster.model_check import check_model
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers import known_architectures
from tests.cluster import broken_models as broken
from tests.cluster.broken_models import copy_model, edit_config, whole_model
from tests.cluster.serving import coatcheck

Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A model without a fault, which the test may break."""
    return copy_model(whole, tmp_path)


def refused(model: Path, folder: Path, *flags: str, seconds: float = 110) -> str:
    """What `coatcheck serve` says of a model, once it is known that it has started no Ray and ended with 2."""
    (folder / "tmp").mkdir()
    environment = {"RAY_TMPDIR": str(folder / "tmp")}
    done = coatcheck("serve", str(model), "--grpc-port", "0", *flags, seconds=seconds, environment=environment)
    assert "starting Ray" not in done.stderr and not list((folder / "tmp").iterdir()), done.stderr
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: "), done.stderr
    return last


@pytest.mark.parametrize(
    ("fault", "flags", "said"),
    [
        (broken.lose_shard, [], "names model-2.safetensors, missing here; fetch it again"),
        (broken.truncate_shard, [], "is truncated"),
        (broken.keep_a_pickle_alone, [], "has no safetensors file (it has pytorch_model.bin); other weight formats"),
        (broken.lose_tokenizer, [], "has no tokenizer (no tokenizer.json"),
        (partial(edit_config, model_type="novel"), [], "config.json has model_type 'novel', which transformers"),
        (partial(edit_config, num_local_experts=4), ["--deterministic"], "serve a mixture of experts without"),
    ],
)
def test_the_command_ends_before_ray_starts(
    model: Path, tmp_path: Path, fault: Break, flags: list[str], said: str
) -> None:
    """For one fault of each kind: the command ends with 2 and the reason, and no Ray was started."""
    fault(model)
    assert said in refused(model, tmp_path, *flags)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (broken.lose_shard, "names model-2.safetensors, missing here"),
        (broken.truncate_shard, r"model-2.safetensors is truncated \(\d+ bytes, its header promises \d+\)"),
        (broken.fill_shard_with_garbage, "model-2.safetensors is not a safetensors file"),
        (broken.leave_pointer, "model-2.safetensors is a Git LFS pointer in place of the weights; run `git lfs pull`"),
        (broken.lie_in_header, "model-2.safetensors cannot be read: .*; fetch it again"),
        (broken.store_in_eight_bits, "tensor model.layers.0.weight is stored as F8_E4M3; only F32, BF16, F16"),
        (broken.keep_a_pickle_alone, r"has no safetensors file \(it has pytorch_model.bin\)"),
        (broken.make_a_shard_a_folder, "has no safetensors file"),
        (broken.lose_tokenizer, "has no tokenizer"),
        (broken.break_tokenizer, "the tokenizer of .* cannot be read"),
        (broken.break_template, "chat template does not compile"),
        (broken.break_generation_config, "generation_config.json is not valid JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named(model: Path, fault: Break, said: str) -> None:
    """The error names the file and what to do; the same model without the fault passes."""
    check_checkpoint(config := ServeConfig.build({"model": str(model)}))
    fault(model)
    with pytest.raises(InvalidModel, match=said):
        check_checkpoint(config)


@pytest.mark.parametrize(
    ("fault", "flags", "said"),
    [
        (broken.break_config, {}, "config.json is not valid JSON"),
        (partial(edit_config, model_type="novel"), {}, "'novel', which transformers [0-9.]+ does not know; install"),
        (partial(edit_config, model_type="novel", auto_map={}), {}, "code that comes with a checkpoint is never run"),
        (partial(edit_config, model_type="clip"), {}, "has no causal language model of that type"),
        (partial(edit_config, quantization_config={"quant_method": "fp8"}), {}, "is quantised; only float32"),
        (partial(edit_config, text_config={}), {}, "takes more than text"),
        (partial(edit_config, is_encoder_decoder=True), {}, "is an encoder-decoder"),
        (None, {"tp": 3}, "tp 3 does not divide the attention heads"),
        (None, {"tp": 8}, r"tp 8 does not divide intermediate_size \(100\)"),
        (None, {"max_model_len": 257}, "max-model-len is 257, but the model goes to 256; use at most that"),
        (None, {"kv_memory": "8KiB", "max_model_len": 256}, "raise kv-memory or lower"),
        (partial(edit_config, num_experts=4), {"deterministic": True}, "num_experts 4 in config.json"),
        (partial(edit_config, head_dim=24), {"deterministic": True, "device": "cpu"}, "heads of a multiple of 16"),
    ],
)
def test_what_config_json_rules_out_is_refused(
    model: Path, fault: Break | None, flags: dict[str, Any], said: str
) -> None:
    """A model or a setting that config.json rules out is refused in the words of a rank; without it all is well."""
    check_model(ServeConfig.build({"model": str(model)}))
    if fault is not None:
        fault(model)
    with pytest.raises((InvalidConfig, InvalidModel), match=said):
        check_model(ServeConfig.build({"model": str(model)} | flags))


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"full_attention": {"rope_type": "yarn", "factor": 4.0}}, 256),
    ],
)
def test_a_context_is_stretched_as_ranks_stretch_it(model: Path, scaling: dict[str, Any], longest: int) -> None:
    """Each kind of rotary scaling allows what a rank allows, and not one token more."""
    edit_config(model, rope_scaling=scaling)
    check_model(ServeConfig.build({"model": str(model), "max_model_len": longest}))
    with pytest.raises(InvalidConfig, match=f"but the model goes to {longest}"):
        check_model(ServeConfig.build({"model": str(model), "max_model_len": longest + 1}))


def test_an_architecture_without_tests_is_built_before_ray_starts(model: Path, tmp_path: Path) -> None:
    """A fault that only building the model shows is found before Ray starts too, and the command says why that takes
    long."""
    edit_config(model, model_type="diffllama")
    assert refused(model, tmp_path).endswith("diffllama cannot be served: layer 0 attends more than once")


def test_cuda_without_gpus_is_refused(tmp_path: Path) -> None:
    """Device cuda is refused where there is no GPU's device file; where there is one, and on a cluster, Ray counts."""
    cuda = {"model": "m/m", "device": "cuda"}
    with pytest.raises(InvalidConfig, match="device is cuda, and this machine has no GPU"):
        check_gpus(ServeConfig.build(cuda), tmp_path)
    check_gpus(ServeConfig.build(cuda | {"ray_address": "127.0.0.1:1"}), tmp_path)
    check_gpus(ServeConfig.build({"model": "m/m"}), tmp_path)
    (tmp_path / "nvidia0").touch()
    check_gpus(ServeConfig.build(cuda), tmp_path)


def test_nodes_elsewhere_may_have_what_this_host_lacks(model: Path) -> None:
    """Where a Ray cluster is joined, weights and tokenizer may be on its nodes alone."""
    broken.lose_shard(model)
    broken.lose_tokenizer(model)
    check_checkpoint(ServeConfig.build({"model": str(model), "ray_address": "127.0.0.1:1"}))


def test_the_quick_checks_import_neither_torch_nor_ray(model: Path) -> None:
    """The checks of an ordinary model do not import the libraries whose imports take seconds."""
    program = (
        "import json, sys\n"
        "from coatcheck.cluster import serve\n"
        "config = serve.ServeConfig.build(json.loads(sys.argv[1]))\n"
        "serve.check_model(config), serve.check_machine(config), serve.check_gpus(config)\n"
        "serve.check_checkpoint(config), serve.check_architecture(config, serve.Console())\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps({"model": str(model)})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_tables_of_transformers_are_read_as_it_reads_them() -> None:
    """Every model type that the installed transformers knows is found in its source, and every causal one of them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type in ("novel", *CONFIG_MAPPING_NAMES):
        if model_type not in CONFIG_MAPPING_NAMES:
            with pytest.raises(InvalidModel, match="does not know"):
                known_architectures.check_known("m", model_type, has_auto_map=False)
        else:
            known_architectures.check_known("m", model_type, has_auto_map=False)
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known_architectures.check_causal("m", model_type)


def test_the_tested_model_types_are_those_of_the_parity_tests() -> None:
    """A type whose model is not built beforehand is one whose tiny model the tests compare with transformers."""
    from tests.workers.checkpoints import ARCHITECTURES

    tested = {model_type for model_type, _ in ARCHITECTURES.values()}
    assert tested == known_architectures.TESTED_MODEL_TYPES
