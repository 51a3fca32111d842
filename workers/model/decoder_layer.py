"""DecoderLayer: a pre-norm decoder layer in few, large operations, for the architectures of fusion.py.

One linear for Q, K and V, one operation for RoPE and the KV store, one for residual add and norm, one linear for gate
and up. On CPUs with the native linears each sublayer is one call into C, and all layers of a rank without peers are one
call. A step of a model with 12 layers of width 128 took 1.39 ms with one call per operation, 0.70 ms with one per
sublayer, and 0.48 ms with one for all layers (bench/LOG.md, 2026-11-21).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coatcheck.kernels.attention.rotary import rotary_and_store
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.layers.decoder_layers import (
    AttentionSublayer,
    FusedLayer,
    FusedLayers,
    MlpSublayer,
    StepTables,
    is_native,
)
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul
from coatcheck.workers.attention.attention import AttentionLayer, attend_cache
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.model.packed_linears import pack_merged, pack_row_parallel
from coatcheck.workers.model.sparse_mlp import ACTIVATIONS, SparseMlp


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from llama."""

    norm_offset: float = 0.0  # gemma's norms scale by 1 + weight
    has_post_norms: bool = False  # gemma norms the outputs of attention and MLP, too
    has_half_tables: bool = False  # gpt-oss' cos and sin have no second half, which would repeat the first


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A step's cos and sin, [T, rot_dim]. `native`: both for the C library; None if no layer runs in C."""

    cos: Tensor
    sin: Tensor
    native: StepTables | None


class DecoderLayer:
    """One decoder layer. It takes and returns (x, residual), whose sum is the hidden state: the next norm adds them.

    A plain object, not a module: at one token a step, a module call costs as much as a small kernel.
    """

    def __init__(self, layer: Any, spec: AttentionLayer, family: Family, *, batch_invariant: bool) -> None:
        """`layer`: transformers' module. `spec`: with this rank's heads."""
        attention = layer.self_attn
        self.spec = spec
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv = pack_merged(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), batch_invariant=batch_invariant)
        self.output, self.reduce = pack_row_parallel(attention.o_proj, batch_invariant=batch_invariant)
        self.sinks = attention.sinks.detach().float() if spec.has_sinks else None
        has_qk_norm = hasattr(attention, "q_norm")
        self.q_norm = read_norm(attention.q_norm, family) if has_qk_norm else None
        self.k_norm = read_norm(attention.k_norm, family) if has_qk_norm else None
        self.first_norm = read_norm(layer.input_layernorm, family)
        self.attention_norm = self.mlp_norm = None
        second_norm = layer.post_attention_layernorm
        if family.has_post_norms:
            self.attention_norm = read_norm(layer.post_attention_layernorm, family)
            self.mlp_norm = read_norm(layer.post_feedforward_layernorm, family)
            second_norm = layer.pre_feedforward_layernorm
        make_mlp = DenseMlp if hasattr(layer.mlp, "down_proj") else SparseMlp
        self.mlp: DenseMlp | SparseMlp = make_mlp(
            layer.mlp, read_norm(second_norm, family), batch_invariant=batch_invariant
        )
        self.attention_sublayer = self._native_attention()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache,
        logits_indices: LogitsIndices | None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden] -> the same, or [R, hidden] for the tokens of `logits_indices`.

        `residual` is None in the first layer.
        """
        if self.attention_sublayer is not None and rotary.native is not None and logits_indices is None:
            x, residual = self.attention_sublayer(x, residual, rotary.native, cache)
        else:
            x, residual = (self.first_norm(x), x) if residual is None else self.first_norm.add_and_norm(x, residual)
            x = self.output(self._attend(self.qkv(x), rotary, metadata, cache, logits_indices))
        if self.reduce is not None:
            x = self.reduce(x)
        if logits_indices is not None:
            residual = residual[logits_indices.tokens]
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        x, residual = self.mlp(x, residual)
        return (x if self.mlp_norm is None else self.mlp_norm(x)), residual

    def _attend(
        self,
        qkv: Tensor,
        rotary: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        spec = self.spec
        q, k, v = qkv.view(qkv.shape[0], -1, spec.head_dim).split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotary_and_store(q, k, v, rotary.cos, rotary.sin, cache, metadata.slot_mapping)
        if logits_indices is not None:
            q, metadata = q[logits_indices.tokens], logits_indices.select_queries(metadata)
        return attend_cache(q, cache, spec, metadata, self.sinks).flatten(1)

    def _native_attention(self) -> AttentionSublayer | None:
        """The attention sublayer as one call into C; None if the linears, the head size or sinks do not allow it."""
        spec = self.spec
        if self.sinks is not None or not is_native(self.qkv, self.output, head_dim=spec.head_dim):
            return None
        return AttentionSublayer(
            self.first_norm,
            self.qkv,
            self.output,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=spec.scale,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
        )


class DenseMlp:
    """Returns down(act(gate(h)) * up(h)) with h = norm(x + residual), and x + residual."""

    def __init__(self, mlp: Any, norm: RmsNorm, *, batch_invariant: bool) -> None:
        self.norm = norm
        self.gate_up = pack_merged(mlp, "gate_up_proj", ("gate_proj", "up_proj"), batch_invariant=batch_invariant)
        self.down, self.reduce = pack_row_parallel(mlp.down_proj, batch_invariant=batch_invariant)
        self.activation = ACTIVATIONS[activation_name(mlp.config)]
        can_run_native = is_native(self.gate_up, self.down)
        self.native_sublayer = MlpSublayer(norm, self.gate_up, self.down, self.activation) if can_run_native else None

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.native_sublayer is not None:
            x, residual = self.native_sublayer(x, residual)
        else:
            x, residual = self.norm.add_and_norm(x, residual)
            x = self.down(silu_mul(self.gate_up(x), self.activation))
        return (x if self.reduce is None else self.reduce(x)), residual


def pack_fused_layers(layers: Sequence[DecoderLayer], table_indices: Sequence[int]) -> FusedLayers | None:
    """All layers as one call into C; None if a layer is not native, or contains an all-reduce.

    `table_indices`: which of the step's rotary tables each layer uses.
    """
    fused = []
    for layer, table in zip(layers, table_indices, strict=True):
        mlp = layer.mlp
        if layer.attention_sublayer is None or mlp.native_sublayer is None:
            return None
        if layer.reduce is not None or mlp.reduce is not None:
            return None
        fused.append(
            FusedLayer(layer.attention_sublayer, mlp.native_sublayer, layer.attention_norm, layer.mlp_norm, table)
        )
    return FusedLayers(fused)


def read_norm(module: Any, family: Family) -> RmsNorm:
    """Our norm with the weight of one of transformers' RMS norms."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RmsNorm(module.weight.detach(), eps, family.norm_offset)


def activation_name(config: Any) -> str:
    """The MLP's activation, by transformers' name."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)
