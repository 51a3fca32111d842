"""DecoderLayer: a pre-norm decoder layer in few, large steps, for the families whose structure we know.

One QKV product, rotary and KV store in one step, residual add and norm in one step, gate and up in one product; and
where the C library can, each half of the layer in one call, or all layers of a rank that is alone. It does not know
which layer it is, nor what is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.attention.rotary import rotary_and_store
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.layers.decoder_layers import AttentionHalf, LayerRun, MlpHalf, RunLayer, StepTables, is_native
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.model.packed_linears import joined, pack_linears, row_parallel

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """How one group of architectures differs from llama."""

    norm_offset: float = 0.0  # gemma's norms scale by 1 + weight
    sandwich: bool = False  # gemma norms the outputs of attention and MLP too


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A step's rotary tables for one kind of layer; `packed` where halves of layers can run natively."""

    cos: Tensor
    sin: Tensor
    packed: StepTables | None


class DecoderLayer:
    """A pre-norm decoder layer. The residual stream arrives unadded: its sum is the first norm's business.

    A plain object that holds its modules' forward methods: at one token a step, a module call costs as much as a
    small kernel. Where the C library can, each half of the layer is one call of it.
    """

    def __init__(
        self, layer: Any, call: AttentionLayer, spec: LayerSpec, family: Family, *, batch_invariant: bool
    ) -> None:
        attention = layer.self_attn
        self.spec = spec
        self.scale = call.scale
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv = joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), batch_invariant=batch_invariant)
        self.output, self.reduce = row_parallel(attention.o_proj, batch_invariant=batch_invariant)
        self.q_norm = read_norm(getattr(attention, "q_norm", None), family)
        self.k_norm = read_norm(getattr(attention, "k_norm", None), family)
        self.first_norm = needed(read_norm(layer.input_layernorm, family))
        if family.sandwich:
            self.attention_norm = read_norm(layer.post_attention_layernorm, family)
            second_norm = needed(read_norm(layer.pre_feedforward_layernorm, family))
            self.mlp_norm = read_norm(layer.post_feedforward_layernorm, family)
        else:
            self.attention_norm = self.mlp_norm = None
            second_norm = needed(read_norm(layer.post_attention_layernorm, family))
        dense = hasattr(layer.mlp, "down_proj")
        make_mlp = DenseMlp if dense else SparseMlp
        self.mlp: DenseMlp | SparseMlp = make_mlp(layer.mlp, second_norm, batch_invariant=batch_invariant)
        self.attention_half = self._native_half()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        turn: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache,
        wanted: LogitsIndices | None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (x, residual), both [T, hidden] or [R, hidden], whose sum is the layer's output."""
        if self.attention_half is not None and turn.packed is not None and wanted is None:
            x, residual = self.attention_half(x, residual, turn.packed, cache)
        else:
            x, residual = (self.first_norm(x), x) if residual is None else self.first_norm.after_adding(x, residual)
            x = self.output(self._attend(self.qkv(x), turn, metadata, cache, wanted))
        if self.reduce is not None:
            x = self.reduce(x)
        if wanted is not None:
            residual = residual[wanted.tokens]
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        x, residual = self.mlp(x, residual)
        return (x if self.mlp_norm is None else self.mlp_norm(x)), residual

    def _attend(
        self,
        qkv: Tensor,
        turn: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache,
        wanted: LogitsIndices | None,
    ) -> Tensor:
        spec = self.spec
        q, k, v = qkv.view(qkv.shape[0], -1, spec.head_dim).split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotary_and_store(q, k, v, turn.cos, turn.sin, cache, metadata.slot_mapping)
        if wanted is not None:
            q, metadata = q[wanted.tokens], wanted.select_queries(metadata)
        out = paged_attention(
            q,
            cache,
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            scale=self.scale,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            batch_invariant=metadata.batch_invariant,
            total_seq_len=metadata.total_seq_len,
            num_prefills=metadata.num_prefills,
        )
        return out.flatten(1)

    def _native_half(self) -> AttentionHalf | None:
        spec = self.spec
        if not is_native(self.qkv, self.output, head_dim=spec.head_dim):
            return None
        return AttentionHalf(
            self.first_norm,
            self.qkv,
            self.output,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=self.scale,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
        )


class DenseMlp:
    """down(act(gate(h)) * up(h)) of h = norm(x + residual), and the sum."""

    def __init__(self, mlp: Any, norm: RmsNorm, *, batch_invariant: bool) -> None:
        self.norm = norm
        self.gate_up = joined(mlp, "gate_up_proj", ("gate_proj", "up_proj"), batch_invariant=batch_invariant)
        self.down, self.reduce = row_parallel(mlp.down_proj, batch_invariant=batch_invariant)
        self.activation = ACTIVATIONS[activation_name(mlp.config)]
        native = is_native(self.gate_up, self.down)
        self.half = MlpHalf(norm, self.gate_up, self.down, self.activation) if native else None

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.half is not None:
            x, residual = self.half(x, residual)
        else:
            x, residual = self.norm.after_adding(x, residual)
            x = self.down(silu_mul(self.gate_up(x), self.activation))
        return (x if self.reduce is None else self.reduce(x)), residual


class SparseMlp:
    """A mixture of experts as transformers wrote it, which wants a batch dimension."""

    def __init__(self, mlp: nn.Module, norm: RmsNorm, *, batch_invariant: bool) -> None:
        pack_linears(mlp, batch_invariant=batch_invariant)
        self.norm = norm
        self.experts = mlp

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.norm.after_adding(x, residual)
        return self.experts(x[None])[0], residual


def as_run(layers: Sequence[DecoderLayer], turns: Sequence[int]) -> LayerRun | None:
    """The layers as one native call, where each of them is native and this rank's alone."""
    parts = []
    for layer, turn in zip(layers, turns, strict=True):
        mlp = layer.mlp
        if layer.attention_half is None or not isinstance(mlp, DenseMlp) or mlp.half is None:
            return None
        if layer.reduce is not None or mlp.reduce is not None:
            return None
        parts.append(RunLayer(layer.attention_half, mlp.half, layer.attention_norm, layer.mlp_norm, turn))
    return LayerRun(parts)


def read_norm(module: Any, family: Family) -> RmsNorm | None:
    if module is None:
        return None
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return RmsNorm(module.weight.detach(), eps, family.norm_offset)


def needed(norm: RmsNorm | None) -> RmsNorm:
    assert norm is not None
    return norm


def activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)
