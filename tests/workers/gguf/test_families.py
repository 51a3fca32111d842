"""Each model family: weights, config.json and tokens of a converted GGUF file are those of the original model."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.held_weights import held_bytes
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.gguf.block_codes import FORMS, Kind
from coatcheck.workers.gguf.converter import Conversion
from coatcheck.workers.gguf.families import FAMILIES, family_of
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.weight_plan import plan_weights
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.gguf.gguf_files import KindOf
from tests.workers.gguf.gguf_models import MODELS, write_model

PROMPT = [3 + 7 * place % 190 for place in range(30)]
# Fields of a config that the file does not have, or that name the same in another way.
_UNTOLD = {"_name_or_path", "architectures", "quantization_config", "eos_token_id", "transformers_version", "dtype"}
# Of the shape that all models of the tests get. Mamba has no attention, MLPs and positions.
_UNREAD_BY_MAMBA = {"max_position_embeddings", "num_attention_heads", "num_key_value_heads", "intermediate_size"}
# By model: fields that are equal in effect, or that the model does not read.
_EQUAL = {
    "llama-other-divisors": {"rope_parameters"}, "mixtral": {"head_dim"}, "gemma": {"hidden_activation"},
    "falcon": {"num_key_value_heads"}, "phi3-longrope": {"rope_parameters"},
    "gpt2": {"num_key_value_heads", "intermediate_size"},
    "hunyuan-alpha": {"rope_parameters"}, "glm4-sections": {"rope_parameters"},
    "glm4-moe-lite": {"model_type", "mlp_layer_types"},
    "qwen35-moe": {"intermediate_size"}, "qwen3-next": {"intermediate_size"}, "dots1": {"sliding_window"},
    **dict.fromkeys(("mamba", "falcon-mamba", "mamba2"), _UNREAD_BY_MAMBA),
    "gemma4-large": {"vocab_size_per_layer_input"}, "gemma4-moe": {"vocab_size_per_layer_input"},
}  # fmt: skip


def convert(path: Path, dtype: str = "float32") -> Path:
    out = path.with_suffix(".converted")
    out.mkdir()
    Conversion.plan(path, dtype).write(out)
    return out


def mixed(name: str) -> Type:
    """The types of llama.cpp's Q4_K_M: some matrices have more bits."""
    if "attn_v" in name or "ffn_down" in name or name == "output.weight":
        return Type.Q6_K
    return Type.Q4_K


def greedy(model: Path, count: int = 12) -> list[int]:
    loaded = load_model(model, communicator=Communicator(), dtype="float32", device="cpu")
    tokens: list[int] = PagedDriver(loaded).greedy([PROMPT], count, chunk=16)[0]
    return tokens


def assert_equal_weights(converted: Path, plain: Path, tolerance: float = 0.0) -> None:
    """The same tensors with the same values."""
    with Checkpoint.open(str(converted)) as one, Checkpoint.open(str(plain)) as other:
        assert one.entries.keys() == other.entries.keys()
        for name in other.entries:
            found = one.read(name, None, torch.float32).float()
            wanted = other.read(name, None, torch.float32)
            assert found.shape == wanted.shape, name
            assert (found - wanted).abs().max() <= tolerance, name


def test_every_family_is_tested() -> None:
    """The models of these tests have every architecture that is served from GGUF."""
    assert {arch for arch, _, _ in MODELS.values()} == FAMILIES.keys()


def test_the_page_has_every_type_and_architecture() -> None:
    """docs/models.md: the table of types with their bits, and the list of architectures."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    for kind, form in FORMS.items():
        block, size = GGML_QUANT_SIZES[kind]
        bits = {Kind.INT8: 8, Kind.INT4: 4, Kind.FP4: 4}[form.kind]
        held = bits + ({"F32": 32, "F16": 16, "U8": 8}[form.scales] + 32 * form.has_zeros) / form.group
        code = f"{form.kind.value}{', zero points' if form.has_zeros else ''}"
        assert f"| {kind.name} | {code} | {form.group} | {8 * size / block:g} | {held:g} |\n" in page
    listed = page.partition("These architectures are served from GGUF:")[2].partition(". Others")[0]
    assert set(re.findall(r"`([\w-]+)`", listed)) == FAMILIES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_converted_as_it_was(tmp_path: Path, name: str) -> None:
    """Weights bit for bit, the fields of config.json as transformers reads them, and greedy tokens."""
    path, plain = write_model(name, tmp_path, Type.Q8_0)
    out = convert(path)
    assert_equal_weights(out, plain)
    left = _UNTOLD | _EQUAL.get(name, set())
    found, wanted = (AutoConfig.from_pretrained(folder).to_dict() for folder in (out, plain))
    assert {key: found.get(key) for key in wanted.keys() - left} == {key: wanted[key] for key in wanted.keys() - left}
    assert greedy(out) == greedy(plain)


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_a_type_keeps_its_codes(tmp_path: Path, kind: Type) -> None:
    """Linears of every type with a form stay quantised, the embedding does not."""
    path, plain = write_model("llama", tmp_path, kind)
    out = convert(path)
    with Checkpoint.open(str(out)) as checkpoint:
        assert checkpoint.is_quantised("model.layers.0.mlp.down_proj.weight")
        assert checkpoint.is_quantised("lm_head.weight")
        assert not checkpoint.is_quantised("model.embed_tokens.weight")
    assert_equal_weights(out, plain, 1e-6 if FORMS[kind].has_zeros else 0.0)
    assert greedy(out) == greedy(plain)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.IQ3_S, Type.IQ2_XXS], ids=lambda kind: kind.name)
def test_other_types_become_plain_weights(tmp_path: Path, kind: Type) -> None:
    """config.json then names no method."""
    path, plain = write_model("qwen3", tmp_path, kind)
    out = convert(path)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert_equal_weights(out, plain)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "qwen3-moe"])
def test_mixed_types_stay_quantised_where_ranks_merge_weights(tmp_path: Path, name: str) -> None:
    """q, k and v of two types get a form that fits both, with the same values."""
    path, plain = write_model(name, tmp_path, mixed)
    out = convert(path)
    assert_equal_weights(out, plain, 1e-6)
    plan = {weight.name: weight.form for weight in Conversion.plan(path).weights}
    forms = {plan[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"}
    assert len(forms) == 1 and None not in forms
    assert greedy(out) == greedy(plain)


@pytest.mark.parametrize("name", ["qwen35", "qwen35-moe"])
def test_weights_whose_columns_are_reordered_stay_quantised(tmp_path: Path, name: str) -> None:
    """The columns of a value head are whole groups of every type."""
    path, plain = write_model(name, tmp_path, mixed)
    out = convert(path)
    assert_equal_weights(out, plain, 1e-6)
    with Checkpoint.open(str(out)) as checkpoint:
        for leaf in ("out_proj", "in_proj_qkv", "in_proj_z", "in_proj_a"):
            assert checkpoint.is_quantised(f"model.layers.0.linear_attn.{leaf}.weight")
    assert greedy(out) == greedy(plain)


def test_columns_that_divide_groups_are_dequantised(tmp_path: Path) -> None:
    """Value heads of 16 columns, in groups of 32."""
    path, plain = write_model(
        "qwen35", tmp_path, Type.Q8_0, linear_num_value_heads=16, linear_value_head_dim=16, linear_num_key_heads=2
    )
    out = convert(path)
    assert_equal_weights(out, plain)
    with Checkpoint.open(str(out)) as checkpoint:
        assert not checkpoint.is_quantised("model.layers.0.linear_attn.out_proj.weight")
        assert checkpoint.is_quantised("model.layers.0.linear_attn.in_proj_qkv.weight")


@pytest.mark.parametrize(
    ("name", "lost", "words"),
    [
        ("lfm2", "blk.1.attn_k.weight", "lacks tensor blk.1.attn_k.weight"),
        ("lfm2", "blk.2.shortconv.conv.weight", "lacks tensor blk.2.shortconv.conv.weight"),
        ("lfm2", "blk.3.ffn_up.weight", "lacks tensor blk.3.ffn_up.weight"),
        ("qwen35", "blk.0.ssm_dt.bias", "lacks tensor blk.0.ssm_dt.bias"),
        ("qwen35", "blk.3.attn_q.weight", "lacks tensor blk.3.attn_q.weight"),
        ("gemma4-large", "blk.0.attn_v.weight", "lacks tensor blk.0.attn_v.weight"),
        ("gemma4-large", "blk.1.attn_k.weight", "lacks tensor blk.1.attn_k.weight"),
        ("glm4-moe", "blk.0.ffn_up.weight", "lacks tensor blk.0.ffn_up.weight"),
        ("glm4-moe", "blk.2.ffn_up_shexp.weight", "lacks tensor blk.2.ffn_up_shexp.weight"),
        ("ernie4_5-moe-interval", "blk.4.ffn_up.weight", "lacks tensor blk.4.ffn_up.weight"),
        ("ernie4_5-moe-interval", "blk.5.ffn_up_exps.weight", "lacks tensor blk.5.ffn_up_exps.weight"),
        ("deepseek-v3", "blk.1.attn_v_b.weight", "lacks tensor blk.1.attn_v_b.weight"),
        ("deepseek-v3", "blk.1.attn_k_b.weight", "lacks tensor blk.1.attn_k_b.weight"),
    ],
)
def test_a_missing_tensor_is_found_before_anything_is_written(tmp_path: Path, name: str, lost: str, words: str) -> None:
    """Also of the only layer of its kind."""
    path, _ = write_model(name, tmp_path, Type.Q8_0)
    file = GgufFile.open(path)
    rest = replace(file, tensors={key: tensor for key, tensor in file.tensors.items() if key != lost})
    with pytest.raises(InvalidModel, match=words):
        plan_weights(rest, family_of(rest), "bfloat16")


@pytest.mark.parametrize("kind", [Type.MXFP4, Type.BF16, Type.Q4_K], ids=lambda kind: kind.name)
def test_experts_of_gpt_oss(tmp_path: Path, kind: Type) -> None:
    """MXFP4 keeps its codes in gpt-oss' own layout; other types are dequantised."""

    def kind_of(name: str) -> Type:
        return kind if "_exps" in name else Type.Q8_0

    path, plain = write_model("gpt-oss", tmp_path, kind_of)
    out = convert(path)
    with Checkpoint.open(str(out)) as checkpoint:
        assert checkpoint.is_quantised("model.layers.0.mlp.experts.gate_up_proj") is (kind is Type.MXFP4)
    assert_equal_weights(out, plain)
    assert greedy(out) == greedy(plain)


@pytest.mark.parametrize("name", ["qwen3-next", "granite-moe-shared", "granite-hybrid", "falcon-h1", "nemotron-h-moe"])
def test_hybrids_and_joined_weights_of_mixed_types(tmp_path: Path, name: str) -> None:
    """Weights of Mamba-2 and DeltaNet layers, and those that are several tensors of a file, have the file's values."""
    path, plain = write_model(name, tmp_path, mixed)
    out = convert(path)
    assert_equal_weights(out, plain, 1e-6)
    assert greedy(out) == greedy(plain)


def test_parts_of_a_weight_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Gates of experts with other sizes than the up projections."""
    path, _ = write_model("granite-moe", tmp_path, Type.F32)
    file = GgufFile.open(path)
    name = "blk.1.ffn_up_exps.weight"
    up = file.tensors[name]
    narrow = replace(up, shape=(*up.shape[:2], up.shape[2] - 32))
    with pytest.raises(InvalidModel, match=r"do not fit together: blk.1.ffn_gate_exps.weight .*; fetch it again"):
        plan_weights(replace(file, tensors={**file.tensors, name: narrow}), family_of(file), "float32")


def test_a_sparsity_for_fewer_layers_is_refused(tmp_path: Path) -> None:
    """Of Gemma 3n, whose metadata has one for each layer."""
    file = GgufFile.open(write_model("gemma3n", tmp_path, Type.F32)[0])
    metadata = {**file.metadata, "gemma3n.activation_sparsity_scale": [1.6]}
    with pytest.raises(InvalidModel, match=r"no gemma3n.activation_sparsity_scale for each layer; fetch it again"):
        family_of(file).config(replace(file, metadata=metadata))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_tokens_are_those_of_transformers_own_reading(tmp_path: Path, kind: Type) -> None:
    """transformers dequantises the same file. Its from_pretrained needs the package accelerate for that."""
    path, _ = write_model("qwen2", tmp_path, kind)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, gguf_file=path.name))
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert not model.load_state_dict(read, strict=False).unexpected_keys
    model.tie_weights()
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert greedy(convert(path)) == answer[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("kind_of", "dtype"),
    [(Type.F16, "float16"), (Type.F32, "float32"), (Type.BF16, "bfloat16"), (Type.Q8_0, "bfloat16")],
)
def test_the_dtype_is_that_of_plain_matrices(tmp_path: Path, kind_of: KindOf | Type, dtype: str) -> None:
    """bfloat16 for a quantised file, whose norms are always float32."""
    assert Conversion.plan(write_model("llama", tmp_path, kind_of)[0]).config["dtype"] == dtype


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe", "gpt-oss", "hunyuan-moe"])
def test_a_rank_holds_the_bytes_that_the_header_shows(tmp_path: Path, name: str) -> None:
    """Every linear and expert of mixed types stays quantised, also merged ones, and the head."""

    def kind_of(tensor: str) -> Type:
        return Type.MXFP4 if name == "gpt-oss" and "_exps" in tensor else mixed(tensor)

    path, _ = write_model(name, tmp_path, kind_of)
    plan, out = Conversion.plan(path), convert(path, "bfloat16")
    model = load_model(out, communicator=Communicator(), dtype="bfloat16", device="cpu")
    held = held_bytes("m", plan.config, plan.entries, 2, "cpu")
    assert model.spec.weight_bytes == held
    matrices = sum(math.prod(weight.shape) for weight in plan.weights if weight.form is not None)
    embedding = 2 * math.prod(plan.entries["model.embed_tokens.weight"].shape)
    assert held - embedding < 1.5 * matrices  # 10 bits of Q6_K's form, and some small tensors


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_counts_what_the_converted_files_hold(tmp_path: Path, device: str) -> None:
    """From the header alone."""
    path, _ = write_model("qwen3-moe", tmp_path, mixed)
    plan, out = Conversion.plan(path), convert(path, "bfloat16")
    with Checkpoint.open(str(out)) as checkpoint:
        stored = checkpoint._stored
    assert {name: (entry.dtype, entry.shape) for name, entry in plan.entries.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in stored.items()
    }
    assert held_bytes("m", plan.config, plan.entries, 2, device) == held_bytes("m", plan.config, stored, 2, device)
