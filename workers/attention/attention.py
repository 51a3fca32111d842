"""The attention function for transformers' models, over the paged KV pool.

transformers' models look up their attention function by name in AttentionInterface. `attend` is registered there under
NAME. It stores the new keys and values in the pool, and reads the context through block tables. NAME is not registered
in transformers' mask interface, so transformers builds no mask: the kernel applies causality, windows and the
boundaries between sequences.

`attend` reads the step from a context variable (`use_step`), because the layers of some models do not pass keyword
arguments on to their attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.attention.paged_tiles import AttentionPlan
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.kernels.kv.store_kv import store_kv
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LayerKind, LibraryPlan
from coatcheck.workers.core.model_spec import LayerSpec

NAME = "coatcheck"

# The caches of the attention layers, then the states of the layers that keep a state.
LayerCaches = list[KVCache] | list[LatentCache] | list[KVCache | RecurrentState]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer(LayerSpec):
    """The attention parameters of one layer, found by attention_probe.py. `module`: the attention module's name.

    `has_gate`: the query projection outputs for each head its query and then a gate (state_layers.py).
    """

    module: str
    scale: float
    has_sinks: bool = False
    has_gate: bool = False


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the layers of one forward pass need.

    `layers`: the attention layers. `cache_indices`: {a layer's index in the model: its index in `layers` and in
    `layer_caches`}.
    """

    metadata: AttentionMetadata
    layers: Sequence[AttentionLayer]
    cache_indices: Mapping[int, int]
    layer_caches: LayerCaches


_step: ContextVar[AttentionStep] = ContextVar("attention_step")


@contextmanager
def use_step(step: AttentionStep) -> Iterator[None]:
    """Make `step` the current step while the context is open."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> AttentionStep:
    """The step of the innermost `use_step`. Raises LookupError outside of one."""
    return _step.get()


def register_attention() -> None:
    """Register `attend` with transformers; idempotent."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """query, key [1, heads or kv_heads, T, dim], value [1, kv_heads, T, v_dim] -> [1, T, heads, v_dim].

    If v_dim is less than dim, the pool pads values with zeros. A layer with a `kv_source` stores nothing: the earlier
    layer has stored `key` and `value` in this step. Scale, window and soft-cap are those that the probe found. The
    arguments with them are ignored, because some models have their window only in the mask. `s_aux`: attention sinks,
    [heads].
    """
    step = current_step()
    index = step.cache_indices[layer_index(module)]
    cache, layer = step.layer_caches[index], step.layers[index]
    assert isinstance(cache, KVCache)  # only our own code computes latent attention
    size = value.shape[3]
    if layer.kv_source is None:
        if size < key.shape[3]:
            value = pad(value, (0, key.shape[3] - size))
        k, v = (x[0].transpose(0, 1).contiguous() for x in (key, value))
        store_kv(k, v, cache, step.metadata.slot_mapping)
    sinks = None if s_aux is None else s_aux.float()
    out = attend_cache(query[0].transpose(0, 1).contiguous(), cache, layer, step.metadata, sinks)
    return out[..., :size].unsqueeze(0), None


def attend_cache(
    q: Tensor, cache: KVCache, layer: AttentionLayer, metadata: AttentionMetadata, sinks: Tensor | None = None
) -> Tensor:
    """q [T, heads, dim] -> [T, heads, dim]: attention of each token over its sequence's keys and values in `cache`.
    `sinks`: float32 [heads]."""
    plan = metadata.plans.get(kind_of(layer)) if metadata.plans else None
    if isinstance(plan, LibraryPlan):
        assert sinks is None  # check_backend_model refuses sinks
        if not len(q):  # no token of the step needs logits, and the libraries do not compute empty steps
            return torch.empty_like(q)
        return plan.attend(
            q, cache, metadata, scale=layer.scale, sliding_window=layer.sliding_window, softcap=layer.softcap
        )
    return paged_attention(
        q,
        cache,
        block_tables=metadata.block_tables,
        seq_lens=metadata.seq_lens,
        cu_seqlens_q=metadata.cu_seqlens_q,
        scale=layer.scale,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
        sinks=sinks,
        batch_invariant=metadata.batch_invariant,
        plan=plan,
    )


def kernel_plan(metadata: AttentionMetadata, layer: LayerSpec) -> AttentionPlan | None:
    """The plan of a layer that only Coatcheck's kernels compute; None on a CPU."""
    plan = metadata.plans.get(kind_of(layer)) if metadata.plans else None
    assert not isinstance(plan, LibraryPlan)  # check_backend_model refuses such layers
    return plan


def kind_of(layer: LayerSpec) -> LayerKind:
    # With token shards each rank attends with the heads of all ranks.
    heads = layer.num_heads * layer.token_shards
    return LayerKind(heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window)


def layer_index(module: nn.Module) -> int:
    """The layer index of an attention module. Raises ValueError if it has none."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ValueError("its attention modules have no layer_idx")
    return layer
