"""LoRA adapters that are not served are refused before weights are read, with their name and what to change."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.adapters import check_adapters
from coatcheck.proto.errors import CoatcheckError, InvalidConfig, InvalidModel
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.lora.adapter import Adapter
from coatcheck.workers.lora.open_adapters import open_adapters
from coatcheck.workers.model.model import load_model
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.lora.adapter_files import write_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("refusals"))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter that is served."""
    return write_adapter(base, tmp_path / "adapter", seed=1, linears=["q_proj", "down_proj"])


def serve_config(base: Path, adapter: Path, **settings: Any) -> ServeConfig:
    return ServeConfig(model=str(base), lora_modules=f"sql={adapter}", **settings)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("peft_type", "LOHA", "peft_type is 'LOHA', and only LORA"),
        ("task_type", "SEQ_CLS", "only CAUSAL_LM"),
        ("use_dora", True, "use_dora is True"),
        ("kasa_config", {"a": 1}, "kasa_config is .*a variant of LoRA"),
        ("bias", "all", "bias is 'all'"),
        ("fan_in_fan_out", True, "fan_in_fan_out is True"),
        ("modules_to_save", ["lm_head"], "modules_to_save is .* merge the adapter"),
        ("trainable_token_indices", [3], "embeddings of tokens are trained"),
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa'"),
        ("init_lora_weights", "lora_ga", "so the adapter fits a changed base model"),
        ("use_rslora", "false", "use_rslora is 'false'; it must be true or false"),
        ("lora_alpha", "eight", "lora_alpha is 'eight' .* must be a number"),
        ("lora_alpha", 10**400, "must be a number"),
        ("r", None, "r is None .* must be a number"),
        ("r", 0, "r is 0; a rank must be above 0"),
        ("r", 8, r"down_proj has rank 4 .* and 8 in adapter_config\.json \(r and rank_pattern\)"),
        ("rank_pattern", {"q_proj": 2}, "q_proj has rank 4 .* and 2 in adapter_config"),
        ("rank_pattern", {"q_proj": 0}, "a rank in rank_pattern is 0"),
        ("rank_pattern", ["q_proj"], "must map regular expressions to numbers"),
        ("alpha_pattern", {"q_proj": "8"}, "must map regular expressions to numbers"),
        ("alpha_pattern", {"*": 3}, r"the key '\*' of alpha_pattern .* is no regular expression"),
        ("alpha_pattern", {"a{99999999999}": 3}, "of alpha_pattern .* is no regular expression"),
        ("alpha_pattern", {"(" * 5000 + ")" * 5000: 3}, "of alpha_pattern .* is no regular expression"),
    ],
)
def test_fields_that_change_the_result(base: Path, adapter: Path, field: str, value: object, reason: str) -> None:
    """What adapter_config.json asks for beyond plain LoRA is refused by the name of its field."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(InvalidModel, match=f"lora-modules sql: .*{reason}"):
        check_adapters(serve_config(base, adapter))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 9), "not A or B of a linear"),
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "lm_head has only lora_A"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", (64, 5), r"they must be \[rank, in\]"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", (9, 4), "belongs to another base model"),
    ],
)
def test_tensors_that_do_not_fit(base: Path, adapter: Path, name: str, shape: tuple[int, ...], reason: str) -> None:
    """Tensors of other parts, without their pair, or of other shapes are refused by name."""
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(shape)}, file)
    with pytest.raises(InvalidModel, match=f"lora-modules sql.*{reason}"):
        check_adapters(serve_config(base, adapter))


def test_a_dtype_that_is_not_served(base: Path, adapter: Path) -> None:
    """A and B in another dtype than the three of checkpoints are refused by the tensor's name."""
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(file).items()}, file)
    with pytest.raises(
        InvalidModel, match=r"lora-modules sql: .*\.lora_A\.weight is stored as F64; only F32, BF16, F16"
    ):
        check_adapters(serve_config(base, adapter))


def test_a_tensor_that_is_there_twice(base: Path, adapter: Path) -> None:
    """Two tensors for A of one linear, under names that PEFT and others write, are refused by name."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name.removeprefix("base_model.model."): tensors[name] + 1}, file)
    with pytest.raises(InvalidModel, match=r"lora-modules sql: .* are both lora_A of model\.layers\.0"):
        check_adapters(serve_config(base, adapter))


@pytest.mark.parametrize(
    ("field", "value"), [("value", math.nan), ("value", math.inf), ("lora_alpha", 1e308)], ids=["nan", "inf", "alpha"]
)
def test_weights_that_are_not_finite(base: Path, adapter: Path, field: str, value: float) -> None:
    """A diverged training, or an absurd alpha, is refused when A and B are read, not served as NaN."""
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if field == "lora_alpha":
        config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    else:
        tensors = load_file(file)
        next(iter(tensors.values()))[0, 0] = value
        save_file(tensors, file)
    with pytest.raises(InvalidModel, match="lora-modules sql: A or B of model.layers.0.* has NaN or infinity"):
        load_model(base, communicator=Communicator(), device="cpu", lora_modules=[LoraModule("sql", str(adapter))])


@pytest.mark.parametrize("path", ["~nosuchuser/x", "/" + "a" * 300])
def test_a_path_that_cannot_be_read(base: Path, path: str) -> None:
    """A home directory of nobody, or a name that no file system takes, is named in one line."""
    with pytest.raises(InvalidModel, match="lora-modules sql: (no directory|.* cannot be read: File name too long)"):
        check_adapters(serve_config(base, Path(path)))


def test_a_file_that_may_not_be_read(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weights file without read permission is named with the adapter."""

    def read_header(file: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr("coatcheck.workers.lora.adapter.read_header", read_header)
    with pytest.raises(InvalidModel, match=r"lora-modules sql: .*model\.safetensors cannot be read: Permission denied"):
        check_adapters(serve_config(base, adapter))


def test_a_pickled_adapter(base: Path, adapter: Path) -> None:
    """The file that older versions of PEFT wrote is named as the reason, and never loaded."""
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(InvalidModel, match="it has adapter_model.bin, which is not read.*save_pretrained"):
        check_adapters(serve_config(base, adapter))


def test_missing_files(base: Path, adapter: Path) -> None:
    """A missing directory, config or weights file is named."""
    for path in (adapter / "adapter_model.safetensors", adapter / "adapter_config.json"):
        path.unlink()
        with pytest.raises(InvalidModel, match=f"has no {path.name}"):
            check_adapters(serve_config(base, adapter))
    with pytest.raises(InvalidModel, match="no directory .*nowhere"):
        check_adapters(serve_config(base, adapter.parent / "nowhere"))


def test_layers_that_the_model_lacks(base: Path, tmp_path: Path) -> None:
    """An adapter of a deeper model is refused with the linears that may be adapted."""
    deep = tiny_checkpoint("llama", tmp_path, num_hidden_layers=4)
    adapter = write_adapter(deep, tmp_path / "adapter", seed=1, layers=[3])
    with pytest.raises(InvalidModel, match=r"layers\.3\..* can have adapters: .*q_proj"):
        check_adapters(serve_config(base, adapter))


@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_files_with_other_names_than_the_modules(base: Path, adapter: Path, tmp_path: Path, prefix: str) -> None:
    """PEFT uses the names of transformers' modules. Where a checkpoint's files have others, ranks check the adapter."""
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(base / "model.safetensors")
    save_file({name.replace("model.", prefix): tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    check_adapters(serve_config(other, adapter))


def test_linears_that_are_not_served(tmp_path: Path) -> None:
    """Ranks refuse linears whose weights their kernels reorder, such as those of latent attention."""
    path = tiny_checkpoint("deepseek-v2", tmp_path)
    adapter = write_adapter(path, tmp_path / "adapter", seed=1, linears=["q_proj", "kv_b_proj"])
    modules = [LoraModule("mla", str(adapter))]
    with pytest.raises(InvalidModel, match="lora-modules mla adapts .*not served"):
        load_model(path, communicator=Communicator(), device="cpu", lora_modules=modules)


def test_float16_on_a_cpu(base: Path, adapter: Path, tmp_path: Path) -> None:
    """CPUs have no float16, which is refused with adapters before Ray starts and by ranks. GPUs have it. device auto
    takes a GPU if there is one."""
    reason, modules = "on CPU need bfloat16 or float32", [LoraModule("sql", str(adapter))]
    shapes = {
        name: (module.out_features, module.in_features) for name, module in Adapter.open(modules[0]).modules.items()
    }
    for device in ("cpu", "auto"):
        with pytest.raises(InvalidConfig, match=reason):
            check_adapters(serve_config(base, adapter, dtype="float16", device=device), tmp_path)
    with pytest.raises(InvalidConfig, match=reason):
        open_adapters(modules, shapes, lambda name: name, device=torch.device("cpu"), dtype=torch.float16)
    opened = open_adapters(modules, shapes, lambda name: name, device=torch.device("cuda"), dtype=torch.float16)
    assert [one.name for one in opened] == ["sql"]
    (tmp_path / "nvidia0").touch()
    for device in ("cuda", "auto"):
        check_adapters(serve_config(base, adapter, dtype="float16", device=device), tmp_path)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("is_multimodal", [False, True])
def test_a_model_in_float16(adapter: Path, tmp_path: Path, field: str, is_multimodal: bool) -> None:
    """On CPUs a checkpoint whose own dtype is float16 needs --dtype, which the message says before Ray starts."""
    text = {"model_type": "llama", field: "float16"}
    config = {"model_type": "llava", "text_config": text} if is_multimodal else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match="need bfloat16 or float32, not float16; set --dtype"):
        check_adapters(serve_config(tmp_path, adapter), tmp_path / "dev")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("sql", "write NAME=PATH"),
        ("sql=", "write NAME=PATH"),
        ("=a", "write NAME=PATH"),
        ("a=x,b=y,a=z", "it has 'a' twice"),
        (["a=x", '{"name": "a", "path": "y"}'], "it has 'a' twice"),
        (["{"], "is not JSON .*write NAME=PATH"),
        (['{"name":' + "[" * 100_000], "is not JSON .*write NAME=PATH"),
        ([{"name": "a"}], "the strings name and path"),
        ([{"name": "a", "path": "x", "rank": 4}], "no other key"),
        ([{"name": "a,b", "path": "x"}], "neither = nor commas"),
        ([{"name": " ", "path": "x"}], "must not be empty"),
        ("m=x", "has the name of the model"),
    ],
)
def test_the_setting_itself(value: object, reason: str) -> None:
    """A wrong --lora-modules is refused with its form."""
    with pytest.raises(CoatcheckError, match=reason):
        check_adapters(ServeConfig.build({"model": "o/m", "served_model_name": "m", "lora_modules": value}))


@pytest.mark.parametrize(
    "value",
    [
        "a=x, b=/y",
        ["a=x", "b=/y"],
        ['{"name": "a", "path": "x", "base_model_name": "m"}', '{"name": "b", "path": "/y"}'],
        [{"name": "a", "path": "x"}, "b=/y"],
    ],
)
def test_several_adapters_have_absolute_paths(value: object) -> None:
    """Several adapters are given with commas, or as a list of texts or of vLLM's objects; their paths hold in every
    process."""
    config = ServeConfig.build({"model": "m", "lora_modules": value})
    assert config.adapters == (("a", str(Path("x").resolve())), ("b", "/y"))


def test_patterns_are_of_the_adapted_models_names(base: Path, adapter: Path) -> None:
    """The keys of alpha_pattern match the names in the model that was adapted, also if the served one has others."""
    file = adapter / "adapter_config.json"
    fields = {**json.loads(file.read_text()), "alpha_pattern": {"^model.layers.0.*": 2, "q_proj": 16}}
    file.write_text(json.dumps(fields))
    module = LoraModule("a", str(adapter))
    found = Adapter.open(module, lambda name: name.replace("model.layers", "layers"))
    scalings = {name: one.scaling for name, one in found.modules.items() if "q_proj" in name}
    assert scalings == {"layers.0.self_attn.q_proj": 0.5, "layers.1.self_attn.q_proj": 4.0}


def test_the_fingerprint_is_of_weights_and_scale(base: Path, adapter: Path) -> None:
    """Another alpha or another weight is another adapter; another name is not."""
    first = Adapter.open(LoraModule("a", str(adapter))).fingerprint()
    assert Adapter.open(LoraModule("b", str(adapter))).fingerprint() == first
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 9}))
    second = Adapter.open(LoraModule("a", str(adapter))).fingerprint()
    weights = adapter / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    assert len({first, second, Adapter.open(LoraModule("a", str(adapter))).fingerprint()}) == 3
