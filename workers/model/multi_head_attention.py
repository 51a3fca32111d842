"""MultiHeadAttention: MHA, GQA or MQA of a fused decoder layer.

One linear for Q, K and V, one operation for the norms of q and k, RoPE and the KV store. LatentAttention and
LinearAttention are called in the same way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coatcheck.kernels.attention.rotary import rotary_and_store
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.layers.decoder_layers import AttentionSublayer, StepTables, is_native
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_rows import QuantisedRows
from coatcheck.kernels.layers.rms_norm import RmsNorm, norm_rotate_and_store
from coatcheck.workers.attention.attention import AttentionLayer, attend_cache
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.model.packed_linears import PlainLinear, merged_targets, pack_merged, select_rows


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from llama."""

    norm_offset: float = 0.0  # norms scale by norm_offset + weight; 1 in Gemma
    has_post_norms: bool = False  # Gemma also normalises the outputs of attention and MLP
    has_half_tables: bool = False  # gpt-oss' rotary module returns only the first of two equal halves of cos and sin


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A step's cos and sin, each [T, rot_dim]. `native`: both, as the C library reads them; None if the step runs no
    layer in C."""

    cos: Tensor
    sin: Tensor
    native: StepTables | None


class MultiHeadAttention:
    """From the normalised hidden states [T, hidden] to every head's output, [T, heads * output_dim].

    If values are shorter than keys (mimo_v2_flash), the pool pads them with zeros, so that attention reads rows of one
    size.
    """

    def __init__(self, attention: Any, spec: AttentionLayer, family: Family, *, batch_invariant: bool) -> None:
        """`attention`: transformers' module. `spec`: with this rank's heads."""
        self.spec = spec
        # Heads of q, k and v; gated attention has as many gates as heads of q.
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, *([spec.num_heads] * spec.has_gate))
        keys = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        self._key_and_value_columns = keys, spec.num_kv_heads * spec.output_dim
        self._value_scale = float(getattr(attention, "v_scale", 1.0))
        if spec.has_gate:
            _separate_gates(attention, spec)
        names = ("q_proj", "k_proj", "v_proj", *(["gate_proj"] if spec.has_gate else []))
        self.qkv = pack_merged(attention, "qkv_proj", names, batch_invariant=batch_invariant)
        # _separate_gates has reordered the rows of a gated q_proj, so an adapter of q_proj does not fit.
        self.lora_targets = {} if spec.has_gate else merged_targets(self.qkv, attention, "qkv_proj", names)
        self.sinks = attention.sinks.detach().float() if spec.has_sinks else None
        has_qk_norm = hasattr(attention, "q_norm")
        self.q_norm = read_norm(attention.q_norm, family) if has_qk_norm else None
        self.k_norm = read_norm(attention.k_norm, family) if has_qk_norm else None

    def __call__(
        self,
        x: Tensor | QuantisedRows,
        rotary: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """x [T, hidden] -> [T, heads * output_dim], or only the rows of `logits_indices`, if given."""
        spec, qkv = self.spec, self.qkv(x)
        gate = None
        if spec.unpadded_v_dim:
            q, k, v = self._split_and_pad(qkv)
        else:
            q, k, v, *gates = qkv.view(qkv.shape[0], -1, spec.head_dim).split_with_sizes(self.heads, dim=1)
            gate = gates[0] if gates else None
        arguments = q, k, v, rotary.cos, rotary.sin, cache, metadata.slot_mapping
        if self.q_norm is not None and self.k_norm is not None:
            q = norm_rotate_and_store(self.q_norm, self.k_norm, *arguments)
        else:
            q = rotary_and_store(*arguments)
        if logits_indices is not None:
            q, metadata = q[logits_indices.tokens], logits_indices.select_queries(metadata)
            gate = None if gate is None else gate[logits_indices.tokens]
        out = attend_cache(q, cache, spec, metadata, self.sinks)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return out[..., : spec.output_dim].flatten(1)

    def _split_and_pad(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim]. v is scaled, and padded with zeros."""
        spec = self.spec
        keys, values = qkv.split_with_sizes(self._key_and_value_columns, dim=1)
        q, k = keys.unflatten(1, (-1, spec.head_dim)).split_with_sizes(self.heads[:2], dim=1)
        v = qkv.new_zeros((len(qkv), spec.num_kv_heads, spec.head_dim))
        scaled = values.unflatten(1, (-1, spec.unpadded_v_dim)) * self._value_scale
        v[:, :, : spec.unpadded_v_dim] = scaled
        return q, k, v

    def linears(self) -> list[PackedLinear]:
        return [self.qkv]

    def native_sublayer(self, norm: RmsNorm, output: PackedLinear) -> AttentionSublayer | None:
        """Norm, attention and output projection in one call into C; None if linears, head sizes or sinks forbid it."""
        spec = self.spec
        if self.sinks is not None or spec.has_gate or spec.unpadded_v_dim:
            return None
        if not is_native(self.qkv, output, head_dim=spec.head_dim):
            return None
        return AttentionSublayer(
            norm,
            self.qkv,
            output,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=spec.scale,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
        )


def _separate_gates(attention: Any, spec: AttentionLayer) -> None:
    """Split `q_proj`, which has for each head the rows of its query and then of its gate, into `q_proj` and
    `gate_proj`."""
    dim, whole = spec.head_dim, attention.q_proj
    del attention.q_proj
    for name, first in (("q_proj", 0), ("gate_proj", dim)):
        rows = [(start + first, start + first + dim) for start in range(0, 2 * dim * spec.num_heads, 2 * dim)]
        bias = None if whole.bias is None else select_rows(whole.bias, rows)
        setattr(attention, name, PlainLinear(select_rows(whole.weight, rows), bias))


def read_norm(module: Any, family: Family) -> RmsNorm:
    """RmsNorm with the weight and epsilon of one of transformers' RMS norms."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RmsNorm(module.weight.detach(), eps, family.norm_offset)
