"""The fields of mixtures of experts, from metadata that lacks some of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.families import FAMILIES
from coatcheck.workers.gguf.gguf_file import GgufFile, GgufTensor

_METADATA: dict[str, Any] = {
    "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.kv_lora_rank": 32, "expert_used_count": 8,
    "expert_feed_forward_length": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "experts", "groups"),
    [
        ("deepseek2", 160, (8, 3)),
        ("deepseek2", 256, (8, 4)),
        ("deepseek2", 64, (1, 1)),
        ("glm4moe", 160, (1, 1)),
        ("glm4moe", 256, (1, 1)),
    ],
)
def test_groups_of_experts_that_a_file_lacks(architecture: str, experts: int, groups: tuple[int, int]) -> None:
    """DeepSeek's are known by the number of experts. GLM-4.5 has as many experts as DeepSeek V2, and no groups."""
    config = FAMILIES[architecture].config(file_of(architecture, expert_count=experts))
    assert (config["n_group"], config["topk_group"]) == groups


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(interleave_moe_layer_step=0), "ernie4_5-moe.interleave_moe_layer_step 0; it should be at least 1"),
        (dict(interleave_moe_layer_step=3), "no layer with experts"),
        (dict(leading_dense_block_count=2), "no layer with experts"),
    ],
)
def test_intervals_of_experts_that_fit_no_layer_are_refused(fields: dict[str, int], message: str) -> None:
    """Of ERNIE 4.5, with two layers."""
    with pytest.raises(InvalidModel, match=message):
        FAMILIES["ernie4_5-moe"].config(file_of("ernie4_5-moe", expert_count=4, **fields))


@pytest.mark.parametrize(
    ("architecture", "name", "message"),
    [
        ("phi2", "blk.0.attn_qkv.weight", "q, k and v of phi2 as one tensor, .* a newer llama.cpp has converted"),
        ("olmo", "blk.0.attn_q.bias", "biases in the attention of olmo, which are not read from GGUF"),
    ],
)
def test_attention_that_is_not_read_is_refused(architecture: str, name: str, message: str) -> None:
    """Fused projections of Phi-2, and biases of OLMo's."""
    file = file_of(architecture, **{"attention.layer_norm_epsilon": 1})
    FAMILIES[architecture].config(file)
    tensor = GgufTensor(name, file.path, GGMLQuantizationType.F32, (64,), 0)
    with pytest.raises(InvalidModel, match=message):
        FAMILIES[architecture].config(replace(file, tensors={**file.tensors, name: tensor}))


def file_of(architecture: str, **fields: int) -> GgufFile:
    path = Path("model.gguf")
    metadata = {f"{architecture}.{key}": value for key, value in (_METADATA | fields).items()}
    embedding = GgufTensor("token_embd.weight", path, GGMLQuantizationType.F32, (96, 64), 0)
    return GgufFile(path, (path,), architecture, metadata, {embedding.name: embedding})
