"""Fusion: the same arithmetic in fewer, larger steps, for decoder layers whose structure we know.

Every linear becomes a PackedLinear. Layers of the families in `_FAMILIES` are replaced by FusedLayer: one QKV product,
rotary and KV store in one step, residual add and norm in one step, gate and up in one product. Other architectures
keep transformers' own modules. The parity tests hold both to transformers' answers. It does not know what is served.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.linear import PackedLinear
from ..kernels.paged_attention import paged_attention
from ..kernels.rms_norm import rms_norm
from ..kernels.rotary import rotary_and_store
from ..kernels.silu_mul import silu_mul
from .attention import AttentionCall, KVPools
from .attention_metadata import AttentionMetadata
from .model_spec import LayerSpec
from .wanted import Wanted

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """How one group of architectures differs from llama."""

    norm_offset: float = 0.0  # gemma's norms scale by 1 + weight
    sandwich: bool = False  # gemma norms the outputs of attention and MLP too


# By transformers' model_type: their decoder layers have been read, and are tested, to do just what FusedLayer does.
_FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe"), Family()),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(norm_offset=1.0, sandwich=True)),
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's numbers."""

    weight: Tensor
    eps: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=self.offset)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual=residual, weight_offset=self.offset)


class FusedBody:
    """Embedding, layers and final norm, over flattened tokens without a batch dimension."""

    def __init__(self, base: Any, layers: Sequence["FusedLayer"], kinds: Sequence[str | None], norm: Norm) -> None:
        self.embed_tokens = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = norm
        self._kinds = tuple(dict.fromkeys(kinds))  # which rotary each layer takes, where there are several
        self._layers = list(zip(layers, kinds, strict=True))

    def __call__(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv: KVPools, wanted: Wanted | None
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        turns = {kind: self._turn(hidden, positions, kind) for kind in self._kinds}
        residual: Tensor | None = None
        last = len(self._layers) - 1
        for index, ((layer, kind), cache) in enumerate(zip(self._layers, kv, strict=True)):
            rows = wanted if index == last else None
            hidden, residual = layer(hidden, residual, turns[kind], metadata, cache, rows)
        assert residual is not None
        return self.norm.after_adding(hidden, residual)[0]

    def _turn(self, hidden: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        arguments = (hidden[None], positions[None]) if kind is None else (hidden[None], positions[None], kind)
        cos, sin = self.rotary(*arguments)
        return cos[0], sin[0]


class FusedLayer:
    """A pre-norm decoder layer. The residual stream arrives unadded: its sum is the first norm's business.

    A plain object that holds its modules' forward methods: at one token a step, a module call costs as much as a
    small kernel.
    """

    def __init__(self, layer: Any, call: AttentionCall, spec: LayerSpec, family: Family) -> None:
        attention = layer.self_attn
        self.spec = spec
        self.scale = call.scale
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv = _joined(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.output = _packed(attention.o_proj)
        self.q_norm = _norm(getattr(attention, "q_norm", None), family)
        self.k_norm = _norm(getattr(attention, "k_norm", None), family)
        self.first_norm = _needed(_norm(layer.input_layernorm, family))
        if family.sandwich:
            self.attention_norm = _norm(layer.post_attention_layernorm, family)
            self.second_norm = _needed(_norm(layer.pre_feedforward_layernorm, family))
            self.mlp_norm = _norm(layer.post_feedforward_layernorm, family)
        else:
            self.attention_norm = self.mlp_norm = None
            self.second_norm = _needed(_norm(layer.post_attention_layernorm, family))
        self.mlp = _fused_mlp(layer.mlp) if hasattr(layer.mlp, "down_proj") else _batched_mlp(layer.mlp)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        turn: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> (x, residual), both [T, hidden] or [R, hidden], whose sum is the layer's output."""
        if residual is None:
            x, residual = self.first_norm(x), x
        else:
            x, residual = self.first_norm.after_adding(x, residual)
        x = self.output(self._attend(self.qkv(x), turn, metadata, cache, wanted))
        if wanted is not None:
            residual = residual[wanted.tokens]
        if self.attention_norm is not None:
            x = self.attention_norm(x)
        x, residual = self.second_norm.after_adding(x, residual)
        x = self.mlp(x)
        return (x if self.mlp_norm is None else self.mlp_norm(x)), residual

    def _attend(
        self,
        qkv: Tensor,
        turn: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: tuple[Tensor, Tensor],
        wanted: Wanted | None,
    ) -> Tensor:
        spec = self.spec
        q, k, v = qkv.view(qkv.shape[0], -1, spec.head_dim).split_with_sizes(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotary_and_store(q, k, v, *turn, *cache, metadata.slot_mapping)
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


def _fused_mlp(mlp: Any) -> Step:
    """down(act(gate(x)) * up(x))."""
    gate_up = _joined(mlp, "gate_up_proj", ("gate_proj", "up_proj"))
    down = _packed(mlp.down_proj)
    activation = _ACTIVATIONS[_activation_name(mlp.config)]
    return lambda x: down(silu_mul(gate_up(x), activation))


def _batched_mlp(mlp: nn.Module) -> Step:
    """A mixture of experts as transformers wrote it, which wants a batch dimension."""
    pack_linears(mlp)
    return lambda x: mlp(x[None])[0]


def fuse(model: PreTrainedModel, calls: list[AttentionCall], specs: Sequence[LayerSpec]) -> FusedBody | None:
    """The fused body, which takes the model's weights over; None for an architecture that we do not know by heart."""
    config: Any = model.config
    family = _FAMILIES.get(config.model_type)
    if family is None or _activation_name(config) not in _ACTIVATIONS or any(call.has_sinks for call in calls):
        return None
    base: Any = model.base_model
    kinds = config.layer_types if isinstance(base.rotary_emb.rope_type, dict) else [None] * len(calls)
    layers = []
    for index, (call, spec) in enumerate(zip(calls, specs, strict=True)):
        # Layer by layer, so that plain and packed weights never stand side by side for the whole model.
        layers.append(FusedLayer(base.layers[index], call, spec, family))
        base.layers[index] = nn.Identity()
    return FusedBody(base, layers, kinds, _needed(_norm(base.norm, family)))


def pack_linears(module: nn.Module) -> None:
    """Replaces every linear below `module` by a packed one; its plain weight is dropped."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:  # a subclass has a forward of its own: phimoe's router is one
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)


def _packed(linear: Any) -> Step:
    if isinstance(linear, nn.Linear):
        return PackedLinear(linear.weight, linear.bias).forward
    pack_linears(linear)  # a row-parallel one, which adds over ranks
    forward: Step = linear.forward
    return forward


def _joined(owner: Any, whole: str, parts: tuple[str, ...]) -> Step:
    """One product for several linears that read the same input; `whole` is its name where the model has it so."""
    if hasattr(owner, whole):
        return _packed(getattr(owner, whole))
    linears = [getattr(owner, name) for name in parts]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return PackedLinear(torch.cat([linear.weight for linear in linears]), bias).forward


def _norm(module: Any, family: Family) -> Norm | None:
    if module is None:
        return None
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.detach(), eps, family.norm_offset)


def _needed(norm: Norm | None) -> Norm:
    assert norm is not None
    return norm


def _activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)
