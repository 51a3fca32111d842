"""The text models of multimodal checkpoints have the tokens of transformers' own multimodal classes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.meta_model import read_config
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import VOCAB
from tests.workers.multimodal_checkpoints import TEXT_FIELDS, TOWERS, VISION_FIELDS, multimodal_config, write_multimodal
from tests.workers.ranks import run_ranks

MAX_TOKENS = 8
PROMPTS = [torch.randint(10, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (50, 23)]


def reference_tokens(path: Path) -> list[list[int]]:
    """Greedy tokens of transformers' multimodal class for each prompt alone."""
    model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)  # type: ignore[misc]
        found.append(out[0, len(prompt) :].tolist())
    return found


def served_tokens(path: Path, communicator: Communicator | None = None) -> list[list[int]]:
    """Greedy tokens of our text model, in chunks and side by side."""
    model = load_model(path, communicator=communicator or Communicator(), dtype="float32", device="cpu")
    return PagedDriver(model).greedy(PROMPTS, MAX_TOKENS, chunk=16)


def tokens_of_all(communicator: Communicator, paths: dict[str, Path]) -> dict[str, list[list[int]]]:
    """The work of one rank: the tokens of each model."""
    return {name: served_tokens(path, communicator) for name, path in paths.items()}


# Types with names of tensors, rules of their text model, or a text type of their own; the others run in full.
_SAMPLE = {
    *("aya_vision", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4-dense", "gemma4-experts", "gemma4_unified", "glm4v"),
    *("glm4v_moe", "granite4_vision", "hunyuan_vl", "idefics2", "kimi_k25", "llama4", "llava", "mistral3-ministral3"),
    *("qwen2_5_vl", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "voxtral"),
}


@pytest.mark.parametrize("name", [n if n in _SAMPLE else pytest.param(n, marks=pytest.mark.full) for n in TOWERS])
def test_text_prompts_have_the_tokens_of_the_multimodal_class(name: str, tmp_path: Path) -> None:
    """The text model of the checkpoint, served in chunks, continues text prompts as the whole model does."""
    path = write_multimodal(name, tmp_path / "model")
    assert served_tokens(path) == reference_tokens(path)


def check_ranks(tp: int, names: list[str], directory: Path) -> None:
    """Every rank has the tokens of one rank alone."""
    paths = {name: write_multimodal(name, directory / name) for name in names}
    expected = {name: served_tokens(path) for name, path in paths.items()}
    for found in run_ranks(tp, tokens_of_all, paths):
        assert found == expected


@pytest.mark.parametrize("tp", [2, 4])
def test_gemma_on_ranks_has_the_tokens_of_one_rank(tp: int, tmp_path: Path) -> None:
    """Layers with 1 and with 2 KV heads, shared keys and values, and experts are divided over ranks."""
    check_ranks(tp, [name for name in TOWERS if name.startswith(("gemma3n", "gemma4"))], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 4])
def test_all_types_on_ranks_have_the_tokens_of_one_rank(tp: int, tmp_path: Path) -> None:
    """The text model of every type is divided over ranks."""
    check_ranks(tp, list(TOWERS), tmp_path)


def test_every_served_multimodal_type_is_tested() -> None:
    """The parity test above has a model of each multimodal type that is served."""
    wholes = {"qwen2_5_omni", "qwen3_omni_moe"}  # of their thinkers
    assert {name.partition("-")[0] for name in TOWERS} | wholes == MULTIMODAL_TYPES


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("gemma3", "language_model.model.layers.0.mlp.up_proj.weight"),
        ("qwen2_5_vl", "model.layers.0.mlp.up_proj.weight"),
        ("qwen3_vl", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("smolvlm", "model.text_model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_other_towers_are_skipped_with_one_line(
    name: str, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints have the published names; one line says how many tensors of other towers are skipped."""
    path = write_multimodal(name, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    assert stored in tensors
    with caplog.at_level(logging.INFO):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
    others = [key for key in tensors if "vis" in key or "projector" in key or "connector" in key]
    (line,) = [record.getMessage() for record in caplog.records if "tensors" in record.getMessage()]
    assert f"only the text model is loaded; {len(others)} tensors of its vision and other towers are skipped" in line


def test_a_config_with_the_text_fields_beside_the_vision_config_is_served(tmp_path: Path) -> None:
    """Qwen2-VL and Qwen2.5-VL were published with the text model's fields at the top of config.json."""
    path = write_multimodal("qwen2_5_vl", tmp_path / "model")
    expected = served_tokens(path)
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    del text["model_type"], text["rope_parameters"]
    flat = text | config | dict(rope_theta=1e4, rope_scaling=dict(type="mrope", mrope_section=[2, 3, 3]))
    (path / "config.json").write_text(json.dumps(flat))
    assert served_tokens(path) == expected


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_of_a_model_that_speaks_the_thinker_is_served(name: str, tmp_path: Path) -> None:
    """Qwen-Omni's checkpoints hold a thinker, which writes text, and a talker. The plan counts the thinker's layers."""
    path = write_multimodal(f"{name}_thinker", tmp_path / "model")
    expected, config = reference_tokens(path), json.loads((path / "config.json").read_text())
    tensors = {f"thinker.{key}": tensor for key, tensor in load_file(path / "model.safetensors").items()}
    tensors["talker.model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(model_type=name, thinker_config=config)))
    assert served_tokens(path) == expected
    model = ModelConfig.open(str(path))
    assert model.is_multimodal and model.is_served
    assert len(ModelShape.of(model).layers) == TEXT_FIELDS["num_hidden_layers"]


@pytest.mark.parametrize("vision", [dict(hidden_size=32), dict(hidden_size=32, label_names=["a", "b"], num_classes=2)])
def test_gemma_3n_is_served_as_published(vision: dict[str, Any], tmp_path: Path) -> None:
    """Its config.json is read without the package of its vision tower. The end tokens are those of the whole model, as
    transformers' generate has them, not the default of the text model's class."""
    text = dict(model_type="gemma3n_text", num_hidden_layers=35, rope_theta=1e6, rope_local_base_freq=1e4)
    values = dict(model_type="gemma3n", eos_token_id=[1, 106], torch_dtype="bfloat16", text_config=text)
    values["vision_config"] = vision | dict(model_type="gemma3n_vision", architecture="mobilenetv5_300m_enc")
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    assert (config.model_type, config.eos_token_id, config.dtype) == ("gemma3n_text", [1, 106], torch.bfloat16)
    assert {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }


def test_a_type_whose_text_model_is_not_served_is_refused(tmp_path: Path) -> None:
    """PaliGemma's prompts attend in both directions, so its text model is not the causal one. The error names the
    types that are served."""
    config = multimodal_config(
        "paligemma", text_config=TEXT_FIELDS | dict(model_type="gemma"), vision_config=VISION_FIELDS
    )
    config.save_pretrained(tmp_path)
    save_file({"model.language_model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match="paligemma is multimodal, and its text model is not served; .* gemma3, "):
        load_model(tmp_path, communicator=Communicator(), dtype="float32", device="cpu")


def test_a_checkpoint_without_a_text_model_is_refused(tmp_path: Path) -> None:
    """A multimodal config.json beside the vision tower's tensors alone is refused."""
    path = write_multimodal("qwen3_vl", tmp_path / "model")
    file = path / "model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if "visual" in key}, file)
    with pytest.raises(InvalidModel, match="no tensor has a name of a text model"):
        load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
