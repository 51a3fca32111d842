"""Our own forward pass for the architectures in `_FAMILIES`: DecoderLayer in place of transformers' layers.

Other architectures run transformers' modules (TransformersBody in model.py). The parity tests compare both with
transformers' logits.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from coatcheck.kernels.layers.decoder_layers import StepTables
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.workers.attention.attention import AttentionLayer, LayerCaches
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.model.decoder_layer import (
    DecoderLayer,
    Family,
    RotaryTables,
    activation_name,
    pack_fused_layers,
    read_norm,
)
from coatcheck.workers.model.sparse_mlp import ACTIVATIONS

# By transformers' model_type. Tests check that their decoder layers compute what DecoderLayer computes.
_FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe"), Family()),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(norm_offset=1.0, has_post_norms=True)),
}


class FusedBody:
    """Embedding, decoder layers and final norm, over flattened tokens without a batch dimension."""

    def __init__(
        self, base: Any, layers: Sequence[DecoderLayer], rope_types: Sequence[str | None], norm: RmsNorm
    ) -> None:
        """`rope_types`: each layer's key for the rotary embedding; None if the model has one for all layers."""
        self.embed_tokens = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = norm
        self._rope_types = tuple(dict.fromkeys(rope_types))
        self._layers = list(zip(layers, rope_types, strict=True))
        self._is_native = any(layer.attention_sublayer is not None for layer in layers)
        self._fused_layers = pack_fused_layers(layers, [self._rope_types.index(rope_type) for rope_type in rope_types])

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        layer_caches: LayerCaches,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """As Model.forward."""
        hidden: Tensor = self.embed_tokens(input_ids)
        rotary = {
            rope_type: self._rotary_tables(hidden, positions, rope_type, metadata) for rope_type in self._rope_types
        }
        residual: Tensor | None = None
        last, done = len(self._layers) - 1, 0
        native_tables = [tables.native for tables in rotary.values() if tables.native is not None]
        if self._fused_layers is not None and native_tables and last > 0:
            # One call into C for all layers, except for a last layer that computes fewer rows.
            done = last if logits_indices is not None else last + 1
            hidden, residual = self._fused_layers(hidden, done, native_tables, layer_caches)
        for index in range(done, last + 1):
            layer, rope_type = self._layers[index]
            rows = logits_indices if index == last else None
            hidden, residual = layer(hidden, residual, rotary[rope_type], metadata, layer_caches[index], rows)
        assert residual is not None
        return self.norm.add_and_norm(hidden, residual)[0]

    def _rotary_tables(
        self, hidden: Tensor, positions: Tensor, rope_type: str | None, metadata: AttentionMetadata
    ) -> RotaryTables:
        arguments = (hidden[None], positions[None]) if rope_type is None else (hidden[None], positions[None], rope_type)
        cos, sin = (table[0] for table in self.rotary(*arguments))
        if not self._is_native:
            return RotaryTables(cos, sin, None)
        tables = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        return RotaryTables(cos, sin, StepTables(cos, sin, *tables))


def is_fusable(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> bool:
    """Whether `fuse` supports the model."""
    config: Any = model.config
    has_sinks = any(layer.has_sinks for layer in layers)
    return config.model_type in _FAMILIES and activation_name(config) in ACTIVATIONS and not has_sinks


def fuse(model: PreTrainedModel, layers: Sequence[AttentionLayer], *, batch_invariant: bool) -> FusedBody | None:
    """Move the model's weights into a FusedBody. Returns None for an architecture that is not fusable.

    `layers`: with this rank's heads.
    """
    config: Any = model.config
    if not is_fusable(model, layers):
        return None
    family = _FAMILIES[config.model_type]
    base: Any = model.base_model
    rope_types = config.layer_types if isinstance(base.rotary_emb.rope_type, dict) else [None] * len(layers)
    fused = []
    for index, layer in enumerate(layers):
        fused.append(DecoderLayer(base.layers[index], layer, family, batch_invariant=batch_invariant))
        base.layers[index] = nn.Identity()  # frees the plain weights layer by layer
    return FusedBody(base, fused, rope_types, read_norm(base.norm, family))
