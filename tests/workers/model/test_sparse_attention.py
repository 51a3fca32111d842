"""Models with sparse attention (DeepSeek V3.2, GLM-5) are served with full attention, where the two are equal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.meta_model import read_config
from coatcheck.workers.model.model import load_model
from coatcheck.workers.model.model_rules import resolve_max_model_len
from tests.workers.architecture_sweep import config_of
from tests.workers.checkpoints import tiny_checkpoint

TYPES = ("deepseek_v32", "glm_moe_dsa")


def load(path: Path, max_model_len: int | None = None) -> Any:
    return load_model(
        path, communicator=Communicator(), dtype="float32", device="cpu", max_model_len=max_model_len, kv_dtype="auto"
    )


@pytest.mark.parametrize("model_type", TYPES)
def test_the_context_ends_where_attention_is_sparse(model_type: str, tmp_path: Path) -> None:
    """The default and the maximum of max-model-len are index_topk. The model says so, and a plan counts what it holds:
    the weights without the indexer's."""
    path = tiny_checkpoint(model_type, tmp_path, config=config_of(model_type))
    assert any(".indexer." in name for name in load_file(path / "model.safetensors"))
    model = load(path)
    assert model.spec.max_model_len == 64
    assert "sparse attention is served up to 64 tokens" in model.note
    assert load(path, 32).spec.max_model_len == 32
    with pytest.raises(
        InvalidConfig, match="max-model-len is 65, but the model's attention is sparse .* index_topk 64"
    ):
        load(path, 65)
    plan = Sizing.of(PlanSettings(model=str(path), dtype="float32", device="cpu"))
    assert (plan.weight_bytes, plan.shape.max_model_len) == (model.spec.weight_bytes, 64)
    assert any("sparse attention is served up to 64 tokens" in note for note in plan.notes)
    assert plan.cache.layers[0].stored_dims == model.spec.layers[0].stored_dims


def test_the_published_limit_is_that_of_the_indexer() -> None:
    """DeepSeek V3.2 has positions for 163,840 tokens by YaRN, and chooses 2,048 of them."""
    yarn = dict(rope_type="yarn", factor=40, original_max_position_embeddings=4096)
    assert resolve_max_model_len(None, 163_840, yarn, 2048) == 2048
    assert resolve_max_model_len(None, 163_840, yarn) == 163_840
    assert resolve_max_model_len(None, 1024, {}, 2048) == 1024


@pytest.mark.parametrize("model_type", TYPES)
def test_a_config_without_index_topk_has_the_classs_default(model_type: str, tmp_path: Path) -> None:
    """The limit is never left out."""
    config: Any = CONFIG_MAPPING[model_type]()
    fields = {name: value for name, value in config.to_dict().items() if name != "index_topk"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path).index_topk == config.index_topk


@pytest.mark.parametrize("index_topk", [0, -1, "64", 64.0, True])
def test_an_index_topk_that_is_no_length_is_refused(index_topk: Any, tmp_path: Path) -> None:
    """The error names the field and its value."""
    fields = config_of("glm_moe_dsa").to_dict() | dict(index_topk=index_topk)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidModel, match=re.escape(f"index_topk {index_topk!r}; it must be a whole number")):
        read_config(tmp_path)


def test_dense_layers_behind_sparse_ones_are_refused(tmp_path: Path) -> None:
    """mlp_layer_types of a form that DeepSeek V3's class cannot have is refused by name."""
    fields = config_of("glm_moe_dsa").to_dict() | dict(mlp_layer_types=["dense", "sparse", "dense", "sparse"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidModel, match=re.escape("mlp_layer_types with a dense layer behind a sparse one")):
        read_config(tmp_path)
