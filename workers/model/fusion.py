"""FusedBody: Coatcheck's own forward pass for the architectures in `_FAMILIES`, made of DecoderLayers.

Other architectures run transformers' modules (TransformersBody in model.py). The parity tests compare both with
transformers' logits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.layers.decoder_layers import StepTables
from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.workers.attention.attention import AttentionLayer, LayerCaches
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.attention.state_layers import StateLayer, interleave
from coatcheck.workers.attention.token_shards import localise
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.lora.attach_adapters import LoraTarget
from coatcheck.workers.model.decoder_layer import (
    DecoderLayer,
    activation_name,
    pack_fused_layers,
)
from coatcheck.workers.model.multi_head_attention import Family, RotaryTables, read_norm
from coatcheck.workers.model.parallel_layers import add_and_norm
from coatcheck.workers.model.rope import CosSinTable, rotary_module
from coatcheck.workers.model.shortcut_experts import halves_of, has_halves
from coatcheck.workers.model.sparse_mlp import ACTIVATIONS, is_known_block

# Model types with latent attention (MLA).
LATENT_TYPES = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "youtu")
# Model types with gated delta nets in most layers and attention in the others.
_QWEN_HYBRIDS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
HYBRID_TYPES = ("kimi_linear", *_QWEN_HYBRIDS)
# By transformers' model_type. Tests check that their decoder layers compute what DecoderLayer computes.
_FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3"), Family()),
    **dict.fromkeys(("glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe"), Family()),
    **dict.fromkeys(LATENT_TYPES, Family()),
    "mimo_v2_flash": Family(),
    "gpt_oss": Family(has_half_tables=True),
    **dict.fromkeys(_QWEN_HYBRIDS, Family(norm_offset=1.0)),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(norm_offset=1.0, has_post_norms=True)),
}


class FusedBody:
    """Embedding, decoder layers and final norm, over flattened tokens without a batch dimension."""

    def __init__(
        self,
        base: Any,
        layers: Sequence[DecoderLayer],
        rope_types: Sequence[str | None],
        norm: RmsNorm,
        token_sharded_layer: AttentionLayer | None,
        cache_indices: Sequence[int],
        *,
        has_half_tables: bool,
    ) -> None:
        """`rope_types`: for each layer, the layer type by which `base.rotary_emb` computes its tables; None if the
        tables are the same in all layers.

        `cache_indices`: for each layer, the index of its cache or state in LayerCaches.
        `token_sharded_layer`: any layer of this rank, if --mla-shard tokens divides the latents; else None.
        """
        self._token_sharded_layer = token_sharded_layer
        self._cache_indices = tuple(cache_indices)
        self.embed_tokens = base.embed_tokens
        self.rotary = rotary_module(base)
        self._dtype = next(base.embed_tokens.parameters()).dtype
        self.norm = norm
        self.lora_step = LoraStep()
        self._has_half_tables = has_half_tables
        self._rope_types = tuple(dict.fromkeys(rope_types))
        self._cos_sin_tables = {
            rope_type: CosSinTable(partial(self._cos_and_sin, rope_type=rope_type)) for rope_type in self._rope_types
        }
        self._layers = list(zip(layers, rope_types, strict=True))
        # Element i: the all-reduce that the input of layer i still needs. Last element: that of the final norm's input.
        self._deferred_sums = [None, *(layer.defer_sum() for layer in layers)]
        self._is_native = any(layer.attention_sublayer is not None for layer in layers)
        table_indices = [self._rope_types.index(rope_type) for rope_type in rope_types]
        self._fused_layers = pack_fused_layers(layers, table_indices, norm)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        layer_caches: LayerCaches,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """The hidden states after the final norm: `Model.forward` describes arguments and result."""
        if self._token_sharded_layer is not None:
            metadata = localise(metadata, self._token_sharded_layer)
        hidden: Tensor = self.embed_tokens(input_ids)
        rotary = {rope_type: self._rotary_tables(positions, rope_type, metadata) for rope_type in self._rope_types}
        residual: Tensor | None = None
        last, done = len(self._layers) - 1, 0
        native_tables = [tables.native for tables in rotary.values() if tables.native is not None]
        if self._fused_layers is not None and native_tables and last > 0:
            # One call into C for all layers. With `logits_indices` the last layer computes fewer rows, and is left out.
            done = last if logits_indices is not None else last + 1
            caches = cast("list[KVCache]", layer_caches)  # layers in C have neither latents nor states
            hidden, residual = self._fused_layers(hidden, done, native_tables, caches)
            if done > last:  # the call has computed the final norm, too
                return hidden
        for index in range(done, last + 1):
            layer, rope_type = self._layers[index]
            rows = logits_indices if index == last else None
            hidden, residual = layer(
                hidden,
                residual,
                rotary[rope_type],
                metadata,
                layer_caches[self._cache_indices[index]],
                rows,
                self._deferred_sums[index],
            )
        assert residual is not None
        return add_and_norm(self.norm, hidden, residual, self._deferred_sums[-1])[0]

    def experts(self) -> list[PackedExperts]:
        """The experts of each layer that has some."""
        return [experts for layer, _ in self._layers for experts in layer.experts()]

    def linears(self) -> list[PackedLinear]:
        """Every linear of the layers."""
        return [linear for layer, _ in self._layers for linear in layer.linears()]

    def lora_targets(self) -> dict[str, LoraTarget]:
        """The linears that can have LoRA adapters, by name within the base model."""
        return {
            f"layers.{index}.{name}": target
            for index, (layer, _) in enumerate(self._layers)
            for name, target in layer.lora_targets().items()
        }

    def _cos_and_sin(self, positions: Tensor, rope_type: str | None) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [T], each [T, rot_dim], by the model's rotary module. The module reads only the
        dtype and the device of its first argument."""
        like = torch.empty(1, 1, 0, dtype=self._dtype, device=positions.device)
        batch = positions[None]
        if hasattr(self.rotary, "mrope_section"):  # qwen3_5: transformers 5.17 takes positions in time, y and x
            batch = batch.expand(3, 1, -1)
        arguments = (like, batch) if rope_type is None else (like, batch, rope_type)
        tables = self.rotary(*arguments)
        if isinstance(tables, Tensor):  # deepseek_v2: a complex tensor, cos + i sin of each pair
            tables = tuple(torch.cat((part, part), dim=-1) for part in (tables.real, tables.imag))
        cos, sin = (table[0] for table in tables)
        if self._has_half_tables:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return cos, sin

    def _rotary_tables(self, positions: Tensor, rope_type: str | None, metadata: AttentionMetadata) -> RotaryTables:
        if positions.device.type == "cpu":
            cos, sin = self._cos_sin_tables[rope_type].rows(positions, metadata.max_seq_len)
        else:
            cos, sin = self._cos_and_sin(positions, rope_type)
        if not self._is_native or self.lora_step.is_active:  # the layers in C do not add adapters
            return RotaryTables(cos, sin, None)
        tensors = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        return RotaryTables(cos, sin, StepTables(cos, sin, *tensors))


def is_fusable(model: PreTrainedModel) -> bool:
    """Whether `fuse` supports the model."""
    config: Any = model.config
    base: Any = model.base_model
    if config.model_type not in _FAMILIES or activation_name(config) not in ACTIVATIONS:
        return False
    # The gated delta nets' convolutions have the same activation, and their kernels compute silu only.
    if config.model_type in HYBRID_TYPES and activation_name(config) != "silu":
        return False
    mlps = (layer.mlp for layer in base.layers)  # `mlp` of a LongCat layer is its experts; its MLPs are dense
    return all(hasattr(mlp, "down_proj") or is_known_block(mlp) for mlp in mlps)


def computes_delta_nets(model: PreTrainedModel) -> bool:
    """Whether LinearAttention computes the model's gated delta nets: in DecoderLayers, or in transformers' layers."""
    return is_fusable(model) or (model.config.model_type == "olmo_hybrid" and activation_name(model.config) == "silu")


def fuse(
    model: PreTrainedModel,
    layers: Sequence[AttentionLayer],
    states: Sequence[StateLayer],
    communicator: Communicator,
    *,
    batch_invariant: bool,
) -> FusedBody | None:
    """Move the model's weights into a FusedBody. Returns None, and changes nothing, if the model is not fusable.

    `layers`, `states`: with this rank's heads.
    """
    config: Any = model.config
    if not is_fusable(model):
        return None
    family = _FAMILIES[config.model_type]
    base: Any = model.base_model
    mixers: list[AttentionLayer | StateLayer] = [*layers, *states]  # in the order of LayerCaches
    state_indices = [(state.spec.layer, len(layers) + i) for i, state in enumerate(states)]
    cache_indices = interleave(range(len(layers)), state_indices)
    rope_type = getattr(rotary_module(base), "rope_type", None)
    rope_types = config.layer_types if isinstance(rope_type, dict) else [None] * len(mixers)
    fused: list[DecoderLayer] = []
    for index, module in enumerate(base.layers):
        halves = halves_of(module, batch_invariant=batch_invariant) if has_halves(module) else [(module, None, None)]
        for part, shortcut_to_compute, shortcut_to_add in halves:
            layer = DecoderLayer(
                part,
                mixers[cache_indices[len(fused)]],
                family,
                communicator,
                batch_invariant=batch_invariant,
                shortcut_to_compute=shortcut_to_compute,
                shortcut_to_add=shortcut_to_add,
            )
            fused.append(layer)
        base.layers[index] = nn.Identity()  # frees this layer's unpacked weights before the next layer is packed
    norm = read_norm(base.norm, family)
    token_sharded_layer = next((layer for layer in layers if layer.token_shards > 1), None)
    return FusedBody(
        base,
        fused,
        rope_types,
        norm,
        token_sharded_layer,
        cache_indices,
        has_half_tables=family.has_half_tables,
    )
