"""The text models of multimodal checkpoints have the tokens of transformers' own multimodal classes."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.verification.paged_driver import PagedDriver
from tests.workers.checkpoints import VOCAB
from tests.workers.multimodal_checkpoints import TEXT_FIELDS, TOWERS, VISION_FIELDS, multimodal_config, write_multimodal

MAX_TOKENS = 8
PROMPTS = [torch.randint(10, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (50, 23)]


def reference_tokens(path: Path) -> list[list[int]]:
    """Greedy tokens of transformers' multimodal class for each prompt alone."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)  # type: ignore[misc]
        found.append(out[0, len(prompt) :].tolist())
    return found


def served_tokens(path: Path) -> list[list[int]]:
    """Greedy tokens of our text model, in chunks and side by side."""
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
    return PagedDriver(model).greedy(PROMPTS, MAX_TOKENS, chunk=16)


@pytest.mark.parametrize("name", TOWERS)
def test_text_prompts_have_the_tokens_of_the_multimodal_class(name: str, tmp_path: Path) -> None:
    """The text model of the checkpoint, served in chunks, continues text prompts as the whole model does."""
    path = write_multimodal(name, tmp_path / "model")
    assert served_tokens(path) == reference_tokens(path)


def test_every_served_multimodal_type_is_tested() -> None:
    """The parity test above has a model of each multimodal type that is served."""
    assert {name.partition("-")[0] for name in TOWERS} == MULTIMODAL_TYPES


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
