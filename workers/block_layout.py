"""BlockLayout: where each layer's keys and values lie inside one block of the KV pool.

The pool of a rank is one uint8 tensor [num_blocks, bytes_per_block]; a block holds block_size tokens of every
layer, contiguous, so that moving it is one copy. Inside a layer: K [kv_heads, block_size, head_dim], then V the
same. Layers may differ in heads and head_dim. Pure arithmetic: it knows no tensor until `views` is called, and
neither allocation nor meaning of blocks.
"""

from dataclasses import dataclass
from typing import Self

import torch

from .model_spec import LayerSpec

_ALIGNMENT = 64  # one cache line: every slab starts on its own


@dataclass(frozen=True, slots=True)
class LayerSlab:
    """Byte offsets of one layer's K and V inside a block."""

    k_offset: int
    v_offset: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of a block: pure, the same on every rank of a group whose heads divide evenly."""

    block_size: int
    dtype: torch.dtype
    slabs: tuple[LayerSlab, ...]
    bytes_per_block: int

    @classmethod
    def of(cls, layers: tuple[LayerSpec, ...], block_size: int, dtype: torch.dtype) -> Self:
        """Lays the layers out one after the other, each slab aligned to a cache line."""
        slabs, offset = [], 0
        for layer in layers:
            size = layer.num_kv_heads * block_size * layer.head_dim * dtype.itemsize
            padded = -(-size // _ALIGNMENT) * _ALIGNMENT
            slabs.append(LayerSlab(offset, offset + padded, layer.num_kv_heads, layer.head_dim))
            offset += 2 * padded
        return cls(block_size, dtype, tuple(slabs), offset)

    @property
    def bytes_per_token(self) -> float:
        """KV bytes that one token takes on this rank, padding included."""
        return self.bytes_per_block / self.block_size

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """The pool: uint8 [num_blocks, bytes_per_block], zeroed so that every page is ours from the start."""
        return torch.zeros(num_blocks, self.bytes_per_block, dtype=torch.uint8, device=device)

    def views(self, pool: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(K, V) of each layer: [num_blocks, kv_heads, block_size, head_dim], strided over the pool."""
        typed = pool.view(self.dtype)
        return [(self._view(typed, slab, slab.k_offset), self._view(typed, slab, slab.v_offset)) for slab in self.slabs]

    def _view(self, typed: torch.Tensor, slab: LayerSlab, offset: int) -> torch.Tensor:
        heads, dim = slab.num_kv_heads, slab.head_dim
        return typed.as_strided(
            (typed.shape[0], heads, self.block_size, dim),
            (typed.stride(0), self.block_size * dim, dim, 1),
            offset // self.dtype.itemsize,
        )
