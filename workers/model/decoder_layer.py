"""DecoderLayer: a pre-norm decoder layer in few, large operations, for the architectures of fusion.py.

One linear for Q, K and V, one operation for RoPE and the KV store, one for residual add and norm, one linear for gate
and up. On CPUs with the native linears each sublayer (attention or MLP with its norm) is one call into C. In a group of
one rank all layers are one call. A step of a model with 12 layers of width 128 took 1.39 ms with one call per
operation, 0.70 ms with one per sublayer, and 0.48 ms with one for all layers (bench/LOG.md, 2026-11-21).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.kernels.layers.decoder_layers import (
    AttentionSublayer,
    FusedLayer,
    FusedLayers,
    MlpSublayer,
    is_native,
)
from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.layers.silu_mul import silu_mul_for_linear
from coatcheck.workers.attention.attention import AttentionLayer
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.attention.state_layers import StateLayer, output_projection
from coatcheck.workers.core.model_spec import DeltaNetSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.lora.attach_adapters import LoraTarget
from coatcheck.workers.model.latent_attention import LatentAttention
from coatcheck.workers.model.linear_attention import LinearAttention
from coatcheck.workers.model.multi_head_attention import Family, MultiHeadAttention, RotaryTables, read_norm
from coatcheck.workers.model.packed_linears import merged_targets, pack_merged, pack_row_parallel
from coatcheck.workers.model.parallel_layers import RankSum, add_and_norm, norm_for_linear
from coatcheck.workers.model.shortcut_experts import ShortcutExperts
from coatcheck.workers.model.sparse_mlp import ACTIVATIONS, SparseMlp


class DecoderLayer:
    """One decoder layer. It takes and returns (x, residual). Their sum is the hidden state; the next norm adds them.

    Not an nn.Module: in a step of one token, a module call costs as much as a small kernel.
    """

    def __init__(
        self,
        layer: Any,
        spec: AttentionLayer | StateLayer,
        family: Family,
        communicator: Communicator,
        *,
        batch_invariant: bool,
        shortcut_to_compute: ShortcutExperts | None = None,
        shortcut_to_add: ShortcutExperts | None = None,
    ) -> None:
        """`layer`: transformers' module. `spec`: with this rank's heads.

        `shortcut_to_compute`, `shortcut_to_add`: only of the halves of a LongCat layer: the experts that the first half
        computes, and whose output the second half adds.
        """
        self.shortcut_to_compute, self.shortcut_to_add = shortcut_to_compute, shortcut_to_add
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn
        projection = output_projection(attention)
        self.output, self.reduce = pack_row_parallel(projection, batch_invariant=batch_invariant)
        self.first_norm = read_norm(layer.input_layernorm, family)
        self.attention_norm = self.mlp_norm = None
        second_norm = layer.post_attention_layernorm
        if family.has_post_norms:
            self.attention_norm = read_norm(layer.post_attention_layernorm, family)
            self.mlp_norm = read_norm(layer.post_feedforward_layernorm, family)
            second_norm = layer.pre_feedforward_layernorm
        if hasattr(layer.mlp, "post_mlp_layernorm"):  # axk1
            self.mlp_norm = read_norm(layer.mlp.post_mlp_layernorm, family)
        self.mlp: DenseMlp | SparseMlp
        norm = read_norm(second_norm, family)
        if hasattr(layer.mlp, "down_proj"):
            self.mlp = DenseMlp(
                layer.mlp,
                norm,
                batch_invariant=batch_invariant,
                shortcut_to_compute=shortcut_to_compute,
                shortcut_to_add=shortcut_to_add,
            )
        else:
            self.mlp = SparseMlp(layer.mlp, norm, batch_invariant=batch_invariant)
        self._first_linear: PackedLinear | None = None  # reads the first norm's output; None: several do
        self._attention_targets: dict[str, LoraTarget] = {}
        # (the first norm's output, rotary tables, metadata, cache, logits indices) -> every head's output
        # [T, heads * dim].
        self.attend: Callable[[Any, RotaryTables, AttentionMetadata, Any, LogitsIndices | None], Tensor]
        self.attention_sublayer: AttentionSublayer | None = None
        if isinstance(spec, StateLayer):
            assert isinstance(spec.spec, DeltaNetSpec), "prepare_model leaves other kinds to transformers' layers"
            self.attend = net = LinearAttention(attention, spec.spec, batch_invariant=batch_invariant)
            self._attention_linears = net.linears()
        elif spec.is_latent:
            self.attend = latent = LatentAttention(attention, spec, communicator, batch_invariant=batch_invariant)
            self._attention_linears = latent.linears()
        else:
            self.attend = heads = MultiHeadAttention(attention, spec, family, batch_invariant=batch_invariant)
            self.attention_sublayer = heads.native_sublayer(self.first_norm, self.output)
            self._attention_linears = heads.linears()
            self._first_linear = heads.qkv
            if heads.lora_targets:
                output = LoraTarget(self.output, 0, self.output.weight_shape[0])
                self._attention_targets = {**heads.lora_targets, "o_proj": output}

    def linears(self) -> list[PackedLinear]:
        """Every linear of the layer, in the order of their use."""
        shortcut = [] if self.shortcut_to_compute is None else self.shortcut_to_compute.moe.linears()
        return [*self._attention_linears, self.output, *self.mlp.linears(), *shortcut]

    def lora_targets(self) -> dict[str, LoraTarget]:
        """The linears that can have LoRA adapters, by name within the layer."""
        mlp = self.mlp.lora_targets if isinstance(self.mlp, DenseMlp) else {}
        return {
            **{f"self_attn.{name}": target for name, target in self._attention_targets.items()},
            **{f"mlp.{name}": target for name, target in mlp.items()},
        }

    def experts(self) -> list[PackedExperts]:
        """The layer's experts; none in a dense layer."""
        if isinstance(self.mlp, SparseMlp):
            return [self.mlp.moe.experts]
        return [] if self.shortcut_to_compute is None else [self.shortcut_to_compute.moe.experts]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: RotaryTables,
        metadata: AttentionMetadata,
        cache: KVCache | LatentCache | RecurrentState,
        logits_indices: LogitsIndices | None,
        deferred_sum: RankSum | None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden] -> x, residual [T, hidden], or [R, hidden] of the R tokens of `logits_indices`.

        `residual`: None in the first layer. `deferred_sum`: the all-reduce that `x` still needs; see `defer_sum`.
        """
        if self.attention_sublayer is not None and rotary.native is not None and logits_indices is None:
            assert isinstance(cache, KVCache), "neither latent nor linear attention has such a sublayer"
            x = x if deferred_sum is None else deferred_sum(x)
            x, residual = self.attention_sublayer(x, residual, rotary.native, cache)
        else:
            format = None if self._first_linear is None else self._first_linear.input_format
            normed, residual = norm_for_linear(self.first_norm, x, residual, deferred_sum, format)
            x = self.output(self.attend(normed, rotary, metadata, cache, logits_indices))
        deferred_sum = self.reduce
        if logits_indices is not None:
            residual = residual[logits_indices.tokens]
            if self.shortcut_to_add is not None:
                self.shortcut_to_add.select_rows(logits_indices)
        if self.attention_norm is not None:
            x, deferred_sum = self.attention_norm(x if deferred_sum is None else deferred_sum(x)), None
        x, residual = self.mlp(x, residual, deferred_sum)
        return (x if self.mlp_norm is None else self.mlp_norm(x)), residual

    def defer_sum(self) -> RankSum | None:
        """Leave the all-reduce after the MLP to the next norm, because one kernel may compute both.

        Returns the all-reduce, or None if the layer still computes it or has none. The layer must compute it if the
        layer's own norm, or the C library, follows the MLP.
        """
        if self.mlp_norm is not None or self.mlp.native_sublayer is not None:
            return None
        deferred_sum, self.mlp.reduce = self.mlp.reduce, None
        return deferred_sum


class DenseMlp:
    """Returns down(act(gate(h)) * up(h)) with h = norm(x + residual), and x + residual."""

    def __init__(
        self,
        mlp: Any,
        norm: RmsNorm,
        *,
        batch_invariant: bool,
        shortcut_to_compute: ShortcutExperts | None = None,
        shortcut_to_add: ShortcutExperts | None = None,
    ) -> None:
        """`shortcut_to_compute`, `shortcut_to_add`: see DecoderLayer."""
        self.norm = norm
        self._shortcut_to_compute, self._shortcut_to_add = shortcut_to_compute, shortcut_to_add
        parts = ("gate_up_proj", ("gate_proj", "up_proj"))
        self.gate_up = pack_merged(mlp, *parts, batch_invariant=batch_invariant)
        self.down, self.reduce = pack_row_parallel(mlp.down_proj, batch_invariant=batch_invariant)
        self.lora_targets: dict[str, LoraTarget] = {}
        # A half of a LongCat layer has other names than the layer, so it has no targets.
        if shortcut_to_compute is None and shortcut_to_add is None:
            down = LoraTarget(self.down, 0, self.down.weight_shape[0])
            self.lora_targets = {**merged_targets(self.gate_up, mlp, *parts), "down_proj": down}
        self.activation = ACTIVATIONS[activation_name(mlp.config)]
        can_run_native = shortcut_to_compute is None and shortcut_to_add is None and is_native(self.gate_up, self.down)
        self.native_sublayer = MlpSublayer(norm, self.gate_up, self.down, self.activation) if can_run_native else None

    def linears(self) -> list[PackedLinear]:
        return [self.gate_up, self.down]

    def __call__(self, x: Tensor, residual: Tensor, deferred_sum: RankSum | None) -> tuple[Tensor, Tensor]:
        """(output, x + residual), both [T, hidden]. `deferred_sum`: the all-reduce that `x` still needs."""
        has_adapters = self.gate_up.has_adapted_rows or self.down.has_adapted_rows
        if self.native_sublayer is not None and not has_adapters:
            x, residual = self.native_sublayer(x if deferred_sum is None else deferred_sum(x), residual)
        else:
            if self._shortcut_to_compute is not None:  # the experts read the norm's output too, unquantised
                x, residual = add_and_norm(self.norm, x, residual, deferred_sum)
                self._shortcut_to_compute.compute(x)
                gate_up = self.gate_up(x)
            else:
                normed, residual = norm_for_linear(self.norm, x, residual, deferred_sum, self.gate_up.input_format)
                gate_up = self.gate_up(normed)
            x = self.down(silu_mul_for_linear(gate_up, self.activation, self.down.input_format))
            if self._shortcut_to_add is not None:
                x = self._shortcut_to_add.add_to(x)
        return (x if self.reduce is None else self.reduce(x)), residual


def pack_fused_layers(
    layers: Sequence[DecoderLayer], table_indices: Sequence[int], final_norm: RmsNorm
) -> FusedLayers | None:
    """All layers and the final norm as one call into C. None if a layer does not run in C, or if the group has several
    ranks.

    `table_indices`: for each layer, the index of its rotary tables among those of the step.
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
    return FusedLayers(fused, final_norm)


def activation_name(config: Any) -> str:
    """The MLP's activation, by transformers' name."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)
