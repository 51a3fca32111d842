"""The probe of a model's attention finds sliding windows, and results that depend on other tokens."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.attention.mask_probe import UnsupportedMask, find_sliding_window
from coatcheck.workers.model.meta_model import build_meta_model
from coatcheck.workers.model.packed_linears import record_weight_reads
from tests.workers.checkpoints import tiny_config
from tests.workers.model.architectures import SERVED, shape_of

LIMIT = 100_000


def meta_model(config: Any, max_model_len: int = 64) -> Any:
    return build_meta_model(config, torch.bfloat16, torch.device("cpu"), max_model_len)


@pytest.mark.parametrize("window", [1, 2, 16, 4096, LIMIT - 1])
def test_a_window_is_read_out_of_its_mask_function(window: int) -> None:
    """A sliding window of any size is found from its mask function, without a mask of that size."""
    assert find_sliding_window(sliding_window_causal_mask_function(window), LIMIT, heads=4) == window


@pytest.mark.parametrize("window", [LIMIT, 10 * LIMIT])
def test_a_window_beyond_the_context_is_full_attention(window: int) -> None:
    """A window or chunk as long as the context counts as full attention."""
    assert find_sliding_window(causal_mask_function, LIMIT, heads=4) == 0  # type: ignore[arg-type]
    assert find_sliding_window(sliding_window_causal_mask_function(window), LIMIT, heads=4) == 0
    assert (
        find_sliding_window(chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int64)), LIMIT, heads=4)
        == 0
    )


def _every_other(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key) % 2 == 0


def _one_head_alone(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (head > 0) | (query - key < 100)


def _first_tokens(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key < 4


def _later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query + 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)), "neither causal nor a sliding window"),
        (and_masks(causal_mask_function, _every_other), "neither causal nor a sliding window"),
        (and_masks(causal_mask_function, _one_head_alone), "neither causal nor a sliding window"),
        (or_masks(sliding_window_causal_mask_function(64), _first_tokens), "not causal|neither causal"),
        (_later, "not causal"),
        (lambda batch, head, query, key: torch.ones(8, dtype=torch.bool)[key], "depends on more than positions"),
    ],
)
def test_any_other_mask_is_refused(function: Callable[..., Any], message: str) -> None:
    """Chunks, strides, masks of single heads, sinks, later tokens and tables are not mistaken for a window."""
    with pytest.raises(UnsupportedMask, match=message):
        find_sliding_window(function, LIMIT, heads=4)


@pytest.mark.parametrize(
    ("model_type", "differences", "windows"),
    [
        ("phimoe", dict(num_local_experts=4, sliding_window=16), [16, 16]),
        ("phimoe", dict(num_local_experts=4), [0, 0]),
        ("qwen2_moe", dict(num_experts=4, use_sliding_window=True, sliding_window=16, max_window_layers=2), [16, 0]),
        ("qwen2_moe", dict(num_experts=4, sliding_window=16), [0, 0]),
        ("mistral", dict(sliding_window=16), [16, 16]),
    ],
)
def test_windows_are_those_of_the_masks(model_type: str, differences: dict[str, Any], windows: list[int]) -> None:
    """A layer's window is found, also if the model writes it only into its mask."""
    calls = probe_attention(meta_model(shape_of(model_type, **differences)), 64)
    assert [call.sliding_window for call in calls] == windows


class _Delayed(nn.Module):
    """Adds the previous token's input to each token."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.5 * nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class _Averaged(nn.Module):
    """Normalises with a statistic of all tokens of the batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden / hidden.square().mean().sqrt()


class _Counted(nn.Module):
    """Scales by the token's row in the batch."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + torch.arange(hidden.shape[1])[:, None])


@pytest.mark.parametrize("mixer", [_Delayed, _Averaged, _Counted])
@pytest.mark.parametrize("place", ["input_layernorm", "mlp"])
def test_what_mixes_tokens_is_named(mixer: type[nn.Module], place: str) -> None:
    """A layer that mixes tokens before or after attention is refused, and the message names its module."""
    model = meta_model(tiny_config("llama"))
    setattr(model.model.layers[1], place, mixer())
    with pytest.raises(InvalidModel, match=f"be served: model.layers.1.{place} .{mixer.__name__}. .*other tokens"):
        probe_attention(model)


def test_scales_chosen_by_the_longest_position_are_refused() -> None:
    """Rotary frequencies that depend on the longest position of the batch are refused unless they are pinned."""
    config = tiny_config("llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    model = meta_model(config, 256)
    assert len(probe_attention(model, 256)) == config.num_hidden_layers
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(InvalidModel, match="model.rotary_emb"):
        probe_attention(model, 512)


def test_the_model_is_left_as_it_was() -> None:
    """After a probe the parameters are on meta, the buffers are the same objects, and attention is ours again."""
    model = meta_model(tiny_config("qwen3-moe"))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    experts = model.config._experts_implementation
    probe_attention(model)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items()) and len(after) == len(before)
    assert model.config._attn_implementation == "coatcheck"
    assert model.config._experts_implementation == experts


@pytest.mark.parametrize(
    ("model_type", "differences", "attentions"),
    [
        ("llama", dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=8, num_attention_heads=128,
                       num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072), 8),
        ("jamba", {}, 4),
    ],
)  # fmt: skip
def test_a_probe_takes_seconds_at_any_size(model_type: str, differences: dict[str, Any], attentions: int) -> None:
    """A probe of layers of Llama 3.1 405B, and of a hybrid with a slow recurrence, takes seconds and little memory."""
    model = meta_model(CONFIG_MAPPING[model_type](**differences), 4096)
    began = time.process_time()
    assert len(probe_attention(model, 131072)) == attentions
    assert time.process_time() - began < 10  # of this process alone: 0.5 s where measured, more if weights were made


def test_a_config_whose_shapes_do_not_fit_is_refused() -> None:
    """helium's output projection takes hidden_size features, so another head_dim is refused."""
    model = meta_model(shape_of("helium", head_dim=128))
    with pytest.raises(InvalidModel, match="a weight with 64 input features gets 512"):
        probe_attention(model)


def test_linears_whose_weight_is_read_are_found() -> None:
    """hunyuan_v1_moe's routers read their weight's dtype; llama's linears are only called."""
    moe = meta_model(shape_of("hunyuan_v1_moe", num_experts=4, moe_topk=2, head_dim=16))
    with record_weight_reads(moe) as read:
        probe_attention(moe)
    assert read == {layer.mlp.gate.wg for layer in moe.model.layers}
    llama = meta_model(tiny_config("llama"))
    with record_weight_reads(llama) as read:
        probe_attention(llama)
    assert not read
    assert all(type(layer.mlp.up_proj) is nn.Linear for layer in llama.model.layers)


def test_values_longer_than_keys_are_refused() -> None:
    """The message says which sizes the attention has, and which are served."""
    with pytest.raises(InvalidModel, match="values .*32.*; keys must be as long as queries, and values .* no longer"):
        probe_attention(meta_model(shape_of("mimo_v2_flash", head_dim=24, v_head_dim=32)))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_an_earlier_layer_are_found(model_type: str) -> None:
    """The last two layers read the keys and values of the last layer of their kind before them."""
    layers = probe_attention(meta_model(shape_of(model_type, **SERVED[model_type])), 64)
    assert [layer.kv_source for layer in layers] == [None, None, 0, 1]
    assert [layer.sliding_window for layer in layers] == [16, 0, 16, 0]
