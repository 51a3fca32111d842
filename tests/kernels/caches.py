"""Caches for tests: parts of a pool's blocks, with bytes between them that no kernel may write."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
QUANTISED = [torch.float8_e4m3fn, torch.int8, torch.uint8]


def strided_cache(blocks: int, kv_heads: int, size: int, dim: int, dtype: torch.dtype, fill: int = 255) -> KVCache:
    """Every byte is `fill`; 255 makes every float a NaN, so that a read of an unused slot shows."""
    rows = (kv_heads, size, dim // 2 if dtype == torch.uint8 else dim)
    parts: list[tuple[torch.dtype, tuple[int, ...]]] = [(dtype, rows), (dtype, rows)]
    if dtype in QUANTISED:
        parts += [(torch.float16, rows[:2]), (torch.float16, rows[:2])]
    starts, end = [], 16
    for kind, shape in parts:
        starts.append(end)
        end += (math.prod(shape) * kind.itemsize + 31) // 16 * 16
    pool = torch.full((blocks, end), fill, dtype=torch.uint8)
    views = []
    for (kind, shape), start in zip(parts, starts, strict=True):
        typed, first = pool.view(kind), start // kind.itemsize
        views.append(typed[:, first : first + math.prod(shape)].view(blocks, *shape))
    return KVCache(*views)


def pool_of(cache: KVCache) -> Tensor:
    """All bytes of the pool that the cache is part of."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.k.untyped_storage())


def latent_cache(blocks: int, size: int, rank: int, rope_dim: int, dtype: torch.dtype, fill: int = 255) -> LatentCache:
    """Parts of a pool with bytes between them. 255 makes every float a NaN, so that a read of an unused slot shows."""
    parts: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (dtype, (1, size, dim // 2 if dtype == torch.uint8 else dim)) for dim in (rank, rope_dim)
    ]
    if dtype in QUANTISED:
        parts += [(torch.float16, (1, size))] * 2
    starts, end = [], 64
    for kind, shape in parts:
        starts.append(end)
        end += (math.prod(shape) * kind.itemsize + 127) // 64 * 64
    pool = torch.full((blocks, end), fill, dtype=torch.uint8)
    views = []
    for (kind, shape), start in zip(parts, starts, strict=True):
        first = start // kind.itemsize
        views.append(pool.view(kind)[:, first : first + math.prod(shape)].view(blocks, *shape))
    return LatentCache(*views)
