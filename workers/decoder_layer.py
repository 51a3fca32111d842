"""DecoderLayer: a pre-norm decoder layer in few, large steps, for the families whose structure we know.

One QKV product, rotary and KV store in one step, residual add and norm in one step, gate and up in one product; and
where the C library can, each half of the layer in one call. It does not know which layer it is, nor what is served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..kernels.half_layers import AttentionHalf, MlpHalf, StepTables, half_layers_serve
from ..kernels.paged_attention import paged_attention
from ..kernels.rms_norm import RmsNorm
from ..kernels.rotary import rotary_and_store
from ..kernels.silu_mul import silu_mul
from .attention import AttentionCall
from .attention_metadata import AttentionMetadata
from .model_spec import LayerSpec
from .packing import joined, pack_linears, row_parallel
from .wanted import Wanted

Mlp = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """How one group of architectures differs from llama."""

    norm_offset: float = 0.0  # gemma's norms scale by 1 + weight
    sandwich: bool = False  # gemma norms the outputs of attention and MLP too


@dataclass(frozen=True, slots=True)
class Turn:
    """A step's rotary tables for one kind of layer; `packed` where halves of layers can run natively."""

    cos: Tensor
    sin: Tensor
    packed: StepTables | None


class DecoderLayer:
    """A pre-norm decoder layer. The residual stream arrives unadded: its sum is the first norm's business.

    A plain object that holds its modules' forward methods: at one token a step, a module call costs as much as a
    small kernel. Where the C library can, each half of the layer is one call of it.
    """

    def __init__(self, layer: Any, call: AttentionCall, spec: LayerSpec, family: Family) -> None:
        attention = layer.self_attn
        self.spec = spec
        self.scale = call.scale
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv = joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.output, self.reduce = row_parallel(attention.o_proj)
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
        self.mlp = _dense_mlp(layer.mlp, second_norm) if dense else _sparse_mlp(layer.mlp, second_norm)
        self.attention_half = self._native_half()

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        turn: Turn,
        metadata: AttentionMetadata,
        cache: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (x, residual), both [T, hidden] or [R, hidden], whose sum is the layer's output."""
        if self.attention_half is not None and turn.packed is not None and wanted is None:
            x, residual = self.attention_half(x, residual, turn.packed, *cache)
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
        turn: Turn,
        metadata: AttentionMetadata,
        cache: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> Tensor:
        spec = self.spec
        q, k, v = qkv.view(qkv.shape[0], -1, spec.head_dim).split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotary_and_store(q, k, v, turn.cos, turn.sin, *cache, metadata.slot_mapping)
        if wanted is not None:
            q, metadata = q[wanted.tokens], wanted.narrow(metadata)
        out = paged_attention(
            q,
            *cache,
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            scale=self.scale,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
        )
        return out.flatten(1)

    def _native_half(self) -> AttentionHalf | None:
        spec = self.spec
        if not half_layers_serve(self.qkv, self.output, head_dim=spec.head_dim):
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


def _dense_mlp(mlp: Any, norm: RmsNorm) -> Mlp:
    """down(act(gate(h)) * up(h)) of h = norm(x + residual), and the sum."""
    gate_up = joined(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    down, reduce = row_parallel(mlp.down_proj)
    activation = ACTIVATIONS[activation_name(mlp.config)]
    half = MlpHalf(norm, gate_up, down, activation) if half_layers_serve(gate_up, down) else None

    def forward(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if half is not None:
            x, residual = half(x, residual)
        else:
            x, residual = norm.after_adding(x, residual)
            x = down(silu_mul(gate_up(x), activation))
        return (x if reduce is None else reduce(x)), residual

    return forward


def _sparse_mlp(mlp: nn.Module, norm: RmsNorm) -> Mlp:
    """A mixture of experts as transformers wrote it, which wants a batch dimension."""
    pack_linears(mlp)

    def forward(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = norm.after_adding(x, residual)
        return mlp(x[None])[0], residual

    return forward


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
