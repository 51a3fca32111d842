"""What cannot be served is refused before Ray starts, with the reason and what to change."""

import errno
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.machine import check_gpus, check_ports
from coatcheck.cluster.preflight.model import check_download, check_model
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.model import known_architectures
from tests.cluster import broken_models as broken
from tests.cluster.broken_models import NULL, copy_model, edit_config, set_fields, whole_model
from tests.cluster.running_server import coatcheck
from tests.router.tiny_tokenizer import write_model
from tests.workers.checkpoints import ARCHITECTURES, tiny_checkpoint

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


def test_a_download_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a model id are counted by its config.json. Quantised ones are not, and no hub is no fault."""
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    values: dict[str, Any] = {"model_type": "llama", "intermediate_size": 28672, "vocab_size": 128256, **sizes}
    values |= {"torch_dtype": "bfloat16", "max_position_embeddings": 8192}
    config = ServeConfig.build({"model": "org/llama-70b"})
    monkeypatch.setattr(ModelConfig, "open", lambda model: ModelConfig(model, values))
    with pytest.raises(InvalidModel, match="org/llama-70b take 131 GiB, and a download may take 100 GiB"):
        check_download(config, "100GiB")
    check_download(config, "140GiB")
    check_download(config, None)
    with pytest.raises(InvalidConfig, match="--max-download is 'lots'"):
        check_download(config, "lots")
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    check_download(config, "100GiB")
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_download(config, "100GiB")


@pytest.mark.parametrize(
    ("fault", "flags", "said"),
    [
        (broken.lose_shard, [], "names model-2.safetensors, which are missing; fetch it again"),
        (
            partial(edit_config, num_hidden_layers=2),
            ["--max-model-len", "257"],
            "the model supports 256; use at most that",
        ),
    ],
)
def test_the_command_ends_before_ray_starts(
    model: Path, tmp_path: Path, fault: Break, flags: list[str], said: str
) -> None:
    """For a fault of the files and one of a setting: the command ends with 2 and the reason, and starts no Ray."""
    fault(model)
    assert said in refused(model, tmp_path, *flags)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (broken.lose_shard, "names model-2.safetensors, which are missing"),
        (broken.truncate_shard, r"model-2.safetensors is truncated \(\d+ bytes, its header promises \d+\)"),
        (broken.fill_shard_with_garbage, "model-2.safetensors is not a safetensors file"),
        (broken.leave_pointer, "model-2.safetensors is a Git LFS pointer instead of weights; run `git lfs pull`"),
        (broken.lie_in_header, "model-2.safetensors cannot be read: .*; fetch it again"),
        (broken.store_in_eight_bits, "tensor model.embed_tokens.weight is stored as F8_E4M3; only F32, BF16, F16"),
        (broken.keep_a_pickle_alone, r"has no safetensors file \(it has pytorch_model.bin\)"),
        (broken.make_a_shard_a_folder, "has no safetensors file"),
        (broken.lose_tokenizer, "has no tokenizer"),
        (broken.lengthen_shard, r"model-2.safetensors is longer than its header promises \(\d+ bytes, not \d+\)"),
        (broken.lengthen_header, "the header is incomplete"),
        (broken.truncate_header, "the header is incomplete"),
        (partial(broken.map_tensor_to, file="../model-1.safetensors"), "does not map tensors to files beside it"),
        (partial(broken.map_tensor_to, file=".."), "does not map tensors to files beside it"),
        (partial(broken.map_tensor_to, file=["model-1.safetensors"]), "does not map tensors to files beside it"),
        (broken.break_tokenizer, "the tokenizer of .* cannot be read"),
        (broken.truncate_tokenizer, "the tokenizer of .* cannot be read"),
        (partial(broken.write, name="tokenizer_config.json", content=b"[" * 100_000), "config.json is not valid JSON"),
        (broken.break_template, "chat template does not compile"),
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
        (partial(broken.write, name="config.json", content=b"[1]"), {}, "config.json does not hold a JSON object"),
        (partial(broken.write, name="config.json", content=b"\xff"), {}, "config.json is not valid JSON"),
        (partial(broken.write, name="config.json", content=b"\xef\xbb\xbf{}"), {}, "begins with a byte order mark"),
        (partial(broken.write, name="config.json", content="{}".encode("utf-16")), {}, "config.json is not valid JSON"),
        (broken.break_generation_config, {}, "generation_config.json is not valid JSON"),
        (partial(edit_config, model_type="novel"), {}, "'novel', which transformers [0-9.]+ does not know; install"),
        (partial(edit_config, model_type="novel", auto_map={}), {}, "code that comes with a checkpoint is never run"),
        (partial(edit_config, model_type="clip"), {}, "has no causal language model of that type"),
        (partial(edit_config, model_type=["llama"]), {}, r"model_type \['llama'\]; it must be a text such as llama"),
        (partial(edit_config, quantization_config={"quant_method": "hqq"}), {}, "quantised with 'hqq', which is not"),
        (partial(edit_config, text_config={}), {}, "is multimodal"),
        (partial(edit_config, is_encoder_decoder=True), {}, "is an encoder-decoder"),
        (None, {"tp": 3}, "tp 3 does not divide the attention heads"),
        (None, {"tp": 2, "expert_parallel": True}, "has no experts; leave --expert-parallel out"),
        (None, {"tp": 2, "mla_shard": "tokens"}, "has none; leave --mla-shard out"),
        (
            partial(edit_config, num_experts=3),
            {"tp": 2, "expert_parallel": True},
            r"tp 2 does not divide num_experts in config.json, as --expert-parallel needs \(3\); use a divisor of 3",
        ),
        (None, {"attention_backend": "fa3", "dtype": "bf16", "kv_dtype": "int8"}, "pool of kv-dtype int8 has; leave"),
        (None, {"attention_backend": "flashinfer", "dtype": "bf16"}, "takes a head_dim of 64, 128 or 256, and the"),
        (None, {"attention_backend": "fa3", "dtype": "bf16", "deterministic": True}, "leave --deterministic out, or"),
        (None, {"tp": 8}, r"tp 8 does not divide intermediate_size \(100\)"),
        (None, {"max_model_len": 257}, "max-model-len is 257, but the model supports 256; use at most that"),
        (None, {"kv_memory": "8KiB", "max_model_len": 256}, "raise kv-memory or lower"),
        (partial(edit_config, head_dim=24), {"deterministic": True, "device": "cpu"}, "multiple of 16 and at most 256"),
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
    ("changes", "said"),
    [
        ({"hidden_size": 130, "num_attention_heads": 4}, "hidden_size 130, which is not a multiple of its 4"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; it must be from 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "3 num_key_value_heads for 4 attention heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0; it must be from 1"),
        ({"num_key_value_heads": 4.0}, "num_key_value_heads 4.0; it must be a whole number"),
        ({"head_dim": -8}, "head_dim -8; it must be from 1"),
        ({"head_dim": 7}, "head_dim 7; it must be even"),
        ({"hidden_size": "64"}, 'hidden_size "64"; it must be a whole number: correct it'),
        ({"hidden_size": math.nan}, "hidden_size NaN; it must be a whole number"),
        ({"vocab_size": "600"}, 'vocab_size "600"; it must be a whole number'),
        ({"vocab_size": NULL}, "vocab_size null; it must be a whole number"),
        ({"vocab_size": True}, "vocab_size true; it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size 0; it must be from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0; it must be from 1"),
        ({"num_hidden_layers": "2"}, 'num_hidden_layers "2"; it must be a whole number'),
        ({"intermediate_size": -5}, "intermediate_size -5; it must be from 1"),
        ({"max_position_embeddings": NULL}, "max_position_embeddings null; it must be a whole number"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"rope_scaling": {"rope_type": "novel"}}, 'rope_type "novel"; it must be one of default, dynamic, linear'),
        ({"rope_scaling": {"rope_type": [1]}}, r"rope_type \[1\]; it must be one of"),
        ({"model_type": "qwen2", "head_dim": "8"}, 'head_dim "8"; it must be a whole number'),
        ({"rope_scaling": {"type": "mrope"}}, 'rope_type "mrope"; it must be one of'),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor null; it must be a number above 0 for rope_type yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor null; it must be a list of numbers"),
        ({"rope_scaling": "linear"}, 'rope_scaling "linear"; it must be an object or null'),
        ({"rope_parameters": {"full_attention": {"rope_type": "novel"}}}, "rope_parameters.full_attention.rope_type"),
        ({"rope_theta": -1.0}, "rope_theta -1.0; it must be a number above 0"),
        (
            {"dtype": NULL, "torch_dtype": "float8"},
            'torch_dtype "float8"; it must be one of float32, bfloat16, float16',
        ),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps "x"; it must be a number'),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps NaN; it must be a finite number"),
        ({"hidden_act": "novel"}, 'hidden_act "novel"; it must be an activation that transformers knows'),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings "yes"; it must be true or false'),
        ({"eos_token_id": [1, "x"]}, r'eos_token_id \[1, "x"\]; it must be a token id'),
        ({"pad_token_id": 600}, r"pad_token_id 600; it must be below vocab_size \(600\)"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "at most its 2 experts"),
        ({"text_config": 3}, "is multimodal"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(model: Path, changes: dict[str, Any], said: str) -> None:
    """A value of a wrong type or range, or one that does not go with another, is said with its field and value."""
    check_model(ServeConfig.build({"model": str(model)}))
    set_fields(model, changes)
    with pytest.raises(InvalidModel, match=said):
        check_model(ServeConfig.build({"model": str(model)}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vocab_size": 601},
            r"model.embed_tokens.weight has shape \[600, 64\], by config.json it must be \[601, 64\]",
        ),
        ({"hidden_size": 128}, "do not belong together; fetch both again"),
        ({"intermediate_size": 101}, r"down_proj.weight has shape \[64, 100\], by config.json it must be \[64, 101\]"),
        ({"num_key_value_heads": 8}, r"k_proj.weight has shape \[32, 64\], by config.json it must be \[64, 64\]"),
        ({"head_dim": 16}, "do not belong together"),
        (
            {"num_hidden_layers": 3},
            r"the checkpoint lacks model.layers.2.\S+, .* and 5 more, which a model with this config.json has",
        ),
        ({"attention_bias": True}, "the checkpoint lacks model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "the checkpoint lacks model.layers.0.mlp.down_proj.bias"),
    ],
)
def test_tensors_that_config_json_does_not_promise_are_refused(model: Path, changes: dict[str, Any], said: str) -> None:
    """A config.json of another checkpoint is found out from the weights' headers."""
    set_fields(model, changes)
    check_model(config := ServeConfig.build({"model": str(model)}))
    with pytest.raises(InvalidModel, match=said):
        check_checkpoint(config)


def test_a_tied_head_need_not_be_there(model: Path) -> None:
    """A checkpoint without lm_head.weight is refused, unless config.json ties it to the embedding."""
    for file in model.glob("*.safetensors*"):
        file.unlink()
    tensors = broken.llama_tensors()
    del tensors["lm_head.weight"]
    broken.write_shard(model / "model.safetensors", tensors)
    config = ServeConfig.build({"model": str(model)})
    with pytest.raises(InvalidModel, match="the checkpoint lacks lm_head.weight"):
        check_checkpoint(config)
    edit_config(model, tie_word_embeddings=True)
    check_checkpoint(config)


def biases(arch: str) -> dict[str, Any]:
    """The fields that give the architecture's layers biases, set."""
    fields = known_architectures.CONFIG_FIELDS[ARCHITECTURES[arch][0]]
    return {name: True for name in ("attention_bias", "mlp_bias") if name in fields}


@pytest.mark.parametrize(
    ("arch", "flags"),
    [(arch, {}) for arch in ARCHITECTURES] + [(arch, biases(arch)) for arch in ARCHITECTURES if biases(arch)],
)
def test_no_model_of_the_tests_is_refused(tmp_path: Path, arch: str, flags: dict[str, Any]) -> None:
    """Config and tensors that transformers itself writes pass, of each architecture that the tests cover."""
    config = ServeConfig.build({"model": str(tiny_checkpoint(arch, tmp_path, **flags)), "tp": 2})
    write_model(Path(config.model_source))
    check_model(config)
    check_checkpoint(config)


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
    with pytest.raises(InvalidConfig, match=f"but the model supports {longest}"):
        check_model(ServeConfig.build({"model": str(model), "max_model_len": longest + 1}))


def test_an_architecture_without_tests_is_built_before_ray_starts(model: Path, tmp_path: Path) -> None:
    """A fault that only building the model shows is found before Ray starts too, and the command says why that takes
    long."""
    edit_config(model, model_type="diffllama")
    words = (
        "diffllama cannot be served: layer 0 calls attention more than once; docs/models.md lists the types that are"
    )
    assert refused(model, tmp_path).endswith(f"{words} served")


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
        "from coatcheck.cluster.commands import serve\n"
        "config = serve.ServeConfig.build(json.loads(sys.argv[1]))\n"
        "serve.check_model(config), serve.check_memory(config), serve.check_gpus(config)\n"
        "serve.check_checkpoint(config), serve.check_architecture(config, serve.Console())\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps({"model": str(model)})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_tables_of_transformers_are_read_as_it_reads_them() -> None:
    """Every model type that the installed transformers knows is found in its source, and every causal one of them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
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
    tested = {model_type for model_type, _ in ARCHITECTURES.values()}
    assert tested == known_architectures.TESTED_MODEL_TYPES


def test_ports_of_ipv6_addresses_are_checked() -> None:
    """A taken port of an IPv6 host is named with its address in brackets; a free one is accepted."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        for host in ("::1", "[::1]"):
            config = ServeConfig.build({"model": "m/m", "grpc_host": host, "grpc_port": port})
            with pytest.raises(InvalidConfig, match=rf"cannot listen on \[::1\]:{port}: Address already in use"):
                check_ports(config)
    check_ports(ServeConfig.build({"model": "m/m", "grpc_host": "::1", "grpc_port": port, "http_port": "0"}))


def test_a_host_whose_loopback_interface_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a router would wait for its groups without end. A cluster on other hosts is not concerned."""

    def fail(*args: object, **named: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", fail)
    config = {"model": "m/m", "grpc_port": 0, "http_port": "0"}
    with pytest.raises(InvalidConfig, match="at 127.0.0.1: Network is unreachable; bring the loopback interface up"):
        check_ports(ServeConfig.build(config))
    check_ports(ServeConfig.build({**config, "ray_address": "10.0.0.1:6379"}))
