"""TpShard: one rank's part of what a group divides: heads, rows, the vocabulary.

Attention is cut by whole heads; with more ranks than KV heads each KV head is held by size / kv_heads ranks. Pure
arithmetic without torch, which a planner uses as ranks do. It knows no parameter by name.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.tensor_slice import Range


class Heads(Protocol):
    """What there is to divide of a layer, all ranks' heads together."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TpShard:
    """One rank of `size`, and its part of things that are cut."""

    rank: int
    size: int

    def even(self, total: int, what: str) -> Range:
        """An equal part; raises InvalidConfig where it does not divide."""
        if total % self.size:
            raise InvalidConfig(f"tp {self.size} does not divide {what} ({total}); use a divisor of {total}")
        part = total // self.size
        return self.rank * part, (self.rank + 1) * part

    def query_heads(self, layer: Heads) -> Range:
        """This rank's query heads, as a range of rows."""
        first, last = self.even(layer.num_heads, "the attention heads")
        return first * layer.head_dim, last * layer.head_dim

    def kv_heads(self, layer: Heads) -> Range:
        """This rank's KV heads, as a range of rows; one head serves several ranks where there are fewer than ranks."""
        if self.size <= layer.num_kv_heads:
            first, last = self.even(layer.num_kv_heads, "the KV heads")
        else:
            if self.size % layer.num_kv_heads:
                raise InvalidConfig(
                    f"tp {self.size} is no multiple of the {layer.num_kv_heads} KV heads; "
                    f"use a divisor or a multiple of {layer.num_kv_heads}"
                )
            first = self.rank * layer.num_kv_heads // self.size
            last = first + 1
        return first * layer.head_dim, last * layer.head_dim

    def local_heads(self, layer: Heads) -> tuple[int, int]:
        """(query heads, KV heads) of this rank."""
        (q0, q1), (k0, k1) = self.query_heads(layer), self.kv_heads(layer)
        return (q1 - q0) // layer.head_dim, (k1 - k0) // layer.head_dim

    def shard_layer(self, layer: LayerSpec) -> LayerSpec:
        """This rank's part of a layer that is given with all ranks' heads."""
        heads, kv_heads = self.local_heads(layer)
        return replace(layer, num_heads=heads, num_kv_heads=kv_heads)

    def vocabulary(self, rows: int) -> Range:
        """A part of ceil(rows / size) rows, the last one possibly shorter."""
        part = -(-rows // self.size)
        if (self.size - 1) * part >= rows:
            raise InvalidConfig(f"tp {self.size} is too large for a vocabulary of {rows}; use fewer ranks")
        return self.rank * part, min(rows, (self.rank + 1) * part)
