"""TpShard: which attention heads, rows and columns belong to one tensor-parallel rank.

Attention is split by whole heads. With more ranks than KV heads, size / num_kv_heads ranks hold the same KV head.
`coatcheck plan` uses the same arithmetic as the ranks, so this file imports no torch.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LayerSpec,
    LightningSpec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)
from coatcheck.workers.distributed.tensor_slice import Range

_Layer = TypeVar("_Layer", bound=LayerSpec)
_State = TypeVar("_State", bound=StateSpec)


@dataclass(frozen=True, slots=True)
class TpShard:
    """Rank `rank` of `size`. The methods take layers with the heads of all ranks, and raise InvalidConfig if `size`
    does not fit the model.

    `divides_latents`: a rank stores the latents of its part of the tokens (--mla-shard tokens). If False, it stores the
    latents of all tokens.
    """

    rank: int
    size: int
    divides_latents: bool = False

    def split_evenly(self, total: int, what: str) -> Range:
        """This rank's part of `total`. `what`: the name of what is divided, for the error."""
        if total % self.size:
            raise InvalidConfig(f"tp {self.size} does not divide {what} ({total}); use a divisor of {total}")
        part = total // self.size
        return self.rank * part, (self.rank + 1) * part

    def query_rows(self, layer: LayerSpec) -> Range:
        """The rows of the query projection that hold this rank's query heads."""
        first, last = self.split_evenly(layer.num_heads, "the attention heads")
        return first * layer.head_dim, last * layer.head_dim

    def kv_rows(self, layer: LayerSpec) -> Range:
        """The rows of the key (or value) projection that hold this rank's KV heads."""
        if self.size <= layer.num_kv_heads:
            first, last = self.split_evenly(layer.num_kv_heads, "the KV heads")
        else:
            if self.size % layer.num_kv_heads:
                raise InvalidConfig(
                    f"tp {self.size} is no multiple of the {layer.num_kv_heads} KV heads; "
                    f"use a divisor or a multiple of {layer.num_kv_heads}"
                )
            first = self.rank * layer.num_kv_heads // self.size
            last = first + 1
        return first * layer.head_dim, last * layer.head_dim

    def local_heads(self, layer: LayerSpec) -> tuple[int, int]:
        """(query heads, KV heads) of this rank."""
        (q0, q1), (k0, k1) = self.query_rows(layer), self.kv_rows(layer)
        return (q1 - q0) // layer.head_dim, (k1 - k0) // layer.head_dim

    def shard_layer(self, layer: _Layer) -> _Layer:
        """`layer` with this rank's heads and, with `divides_latents`, its part of the tokens."""
        heads, kv_heads = self.local_heads(layer)
        shards, shard = (self.size, self.rank) if self.divides_latents and layer.is_latent else (1, 0)
        return replace(layer, num_heads=heads, num_kv_heads=kv_heads, token_shards=shards, token_shard=shard)

    def shard_state(self, layer: _State) -> _State:
        """`layer` with this rank's key heads and the value heads that they serve, this rank's heads of lightning
        attention, or its channels of a Mamba mixer. Raises InvalidConfig for short convolutions and Mamba-2 mixers,
        which are not divided over ranks."""
        if self.size == 1:
            return layer
        if isinstance(layer, MambaSpec):
            first, last = self.split_evenly(layer.channels, "the channels of the Mamba mixers")
            return replace(layer, channels=last - first)
        if isinstance(layer, LightningSpec):
            first, last = self.split_evenly(layer.heads, "the heads of lightning attention")
            return replace(layer, heads=last - first, first_head=first)
        if not isinstance(layer, DeltaNetSpec):
            kind = "short convolutions" if isinstance(layer, ShortConvSpec) else "Mamba-2 mixers"
            raise InvalidConfig(f"tp {self.size} would divide {kind} over ranks, which is not supported; use tp 1")
        first, last = self.split_evenly(layer.key_heads, "the key heads of linear attention")
        group = layer.value_heads // layer.key_heads
        return replace(layer, key_heads=last - first, value_heads=(last - first) * group)

    def vocab_rows(self, rows: int) -> Range:
        """This rank's part of a vocabulary: ceil(rows / size) rows; the last rank may have fewer."""
        part = -(-rows // self.size)
        if (self.size - 1) * part >= rows:
            raise InvalidConfig(f"tp {self.size} is too large for a vocabulary of {rows}; use fewer ranks")
        return self.rank * part, min(rows, (self.rank + 1) * part)
