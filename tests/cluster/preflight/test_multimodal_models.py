"""Multimodal models whose text model is served pass the checks before Ray starts; others are refused by name."""

import json
from pathlib import Path

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.model import check_model
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from tests.router.tiny_tokenizer import write_model
from tests.workers.multimodal_checkpoints import write_multimodal

# Each kind of config.json: the text type of a family of ours, and one that replaces Qwen's.
_SAMPLE = (
    "gemma3",
    "gemma4-dense",
    "gemma4-experts",
    "gemma4_unified",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_multimodal_checkpoint_passes_the_checks(name: str, tmp_path: Path) -> None:
    """What transformers writes passes, and the planner's layers are those of the loaded text model."""
    path = write_multimodal(name, tmp_path / "model")
    write_model(path)
    config = ServeConfig.build({"model": str(path)})
    check_model(config)
    check_checkpoint(config)
    model = load_model(path, communicator=Communicator(), dtype="float32", device="cpu")
    shape = ModelShape.of(ModelConfig.open(str(path)))
    for planned, loaded in zip(shape.layers, model.spec.layers, strict=True):
        for field in ("num_heads", "num_kv_heads", "head_dim", "sliding_window"):
            assert getattr(planned, field) == getattr(loaded, field), field
    assert "only the text part is counted and served" in shape.notes


def test_a_multimodal_type_that_is_not_served_is_refused(tmp_path: Path) -> None:
    """The refusal names the type and the multimodal types whose text models are served."""
    (tmp_path / "config.json").write_text(
        json.dumps(dict(model_type="paligemma", text_config=dict(model_type="gemma", hidden_size=64)))
    )
    with pytest.raises(InvalidModel, match="paligemma is multimodal, and its text model is not served; .* gemma3, "):
        check_model(ServeConfig.build({"model": str(tmp_path)}))
