"""Fusion: a model's body in fewer, larger steps, for architectures whose decoder layers we know.

Layers of the families in `_FAMILIES` are replaced by DecoderLayer; other architectures keep transformers' own modules.
The parity tests hold both to transformers' answers. It does not know what is served.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from coatcheck.kernels.layers.decoder_layers import StepTables
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.workers.attention.attention import AttentionLayer, KVPools
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.model.decoder_layer import (
    ACTIVATIONS,
    DecoderLayer,
    DenseMlp,
    Family,
    RotaryTables,
    activation_name,
    as_run,
    needed,
    read_norm,
)

# By transformers' model_type: their decoder layers have been read, and are tested, to do just what DecoderLayer does.
_FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe"), Family()),
    **dict.fromkeys(("gemma2", "gemma3_text"), Family(norm_offset=1.0, sandwich=True)),
}


class FusedBody:
    """Embedding, layers and final norm, over flattened tokens without a batch dimension."""

    def __init__(self, base: Any, layers: Sequence[DecoderLayer], kinds: Sequence[str | None], norm: RmsNorm) -> None:
        self.embed_tokens = base.embed_tokens
        self.rotary = base.rotary_emb
        self.norm = norm
        self.is_dense = all(isinstance(layer.mlp, DenseMlp) for layer in layers)  # experts ask the host who has work
        self._kinds = tuple(dict.fromkeys(kinds))  # which rotary each layer takes, where there are several
        self._layers = list(zip(layers, kinds, strict=True))
        self._native = any(layer.attention_half is not None for layer in layers)
        self._run = as_run(layers, [self._kinds.index(kind) for kind in kinds])

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv: KVPools,
        wanted: LogitsIndices | None,
    ) -> Tensor:
        hidden: Tensor = self.embed_tokens(input_ids)
        turns = {kind: self._turn(hidden, positions, kind, metadata) for kind in self._kinds}
        residual: Tensor | None = None
        last, done = len(self._layers) - 1, 0
        tables = [turn.packed for turn in turns.values() if turn.packed is not None]
        if self._run is not None and tables and last > 0:
            done = last if wanted is not None else last + 1
            hidden, residual = self._run(hidden, done, tables, kv)
        for index in range(done, last + 1):
            layer, kind = self._layers[index]
            rows = wanted if index == last else None
            hidden, residual = layer(hidden, residual, turns[kind], metadata, kv[index], rows)
        assert residual is not None
        return self.norm.after_adding(hidden, residual)[0]

    def _turn(self, hidden: Tensor, positions: Tensor, kind: str | None, metadata: AttentionMetadata) -> RotaryTables:
        arguments = (hidden[None], positions[None]) if kind is None else (hidden[None], positions[None], kind)
        cos, sin = (table[0] for table in self.rotary(*arguments))
        if not self._native:
            return RotaryTables(cos, sin, None)
        tables = (metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
        return RotaryTables(cos, sin, StepTables(cos, sin, *tables))


def is_fusable(model: PreTrainedModel, calls: list[AttentionLayer]) -> bool:
    """Whether `fuse` knows the model."""
    config: Any = model.config
    sinks = any(call.has_sinks for call in calls)
    return config.model_type in _FAMILIES and activation_name(config) in ACTIVATIONS and not sinks


def fuse(
    model: PreTrainedModel, calls: list[AttentionLayer], specs: Sequence[LayerSpec], *, batch_invariant: bool
) -> FusedBody | None:
    """The fused body, which takes the model's weights over; None for an architecture that we do not know by heart.

    `batch_invariant`: linears promise that a row's result does not depend on the others (kernels/layers/linear.py).
    """
    config: Any = model.config
    if not is_fusable(model, calls):
        return None
    family = _FAMILIES[config.model_type]
    base: Any = model.base_model
    kinds = config.layer_types if isinstance(base.rotary_emb.rope_type, dict) else [None] * len(calls)
    layers = []
    for index, (call, spec) in enumerate(zip(calls, specs, strict=True)):
        # Layer by layer, so that plain and packed weights never stand side by side for the whole model.
        layers.append(DecoderLayer(base.layers[index], call, spec, family, batch_invariant=batch_invariant))
        base.layers[index] = nn.Identity()
    return FusedBody(base, layers, kinds, needed(read_norm(base.norm, family)))
