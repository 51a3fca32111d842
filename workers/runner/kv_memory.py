"""The KV pool's tensors: one rank's memory for blocks, and each layer's view of it.

It knows the layout and the device; it does not know which block is whose.
"""

import math
from typing import Final

import torch
from torch import Tensor

from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.kv.block_layout import BlockLayout

_TORCH: Final = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
    KvDtype.FP8: torch.float8_e4m3fn,
    KvDtype.INT8: torch.int8,
    KvDtype.INT4: torch.uint8,
}


def allocate_pool(layout: BlockLayout, num_blocks: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, bytes_per_block], zeroed so that every page is ours from the start."""
    return torch.zeros(num_blocks, layout.bytes_per_block, dtype=torch.uint8, device=device)


def layer_caches(layout: BlockLayout, pool: Tensor) -> list[KVCache]:
    """Each layer's part of the pool, strided over it."""
    dtype, size = _TORCH[layout.kv_dtype], layout.block_size
    caches = []
    for slab in layout.slabs:
        shape = (slab.num_kv_heads, size, slab.head_dim * layout.kv_dtype.bits // (8 * dtype.itemsize))
        parts = [_view(pool, dtype, offset, shape) for offset in (slab.k_offset, slab.v_offset)]
        if layout.kv_dtype.is_quantised:
            offsets = (slab.k_scales_offset, slab.v_scales_offset)
            parts += [_view(pool, torch.float16, offset, shape[:2]) for offset in offsets]
        caches.append(KVCache(*parts))
    return caches


def _view(pool: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    """[num_blocks, *shape] of one part of every block."""
    typed, start, size = pool.view(dtype), offset // dtype.itemsize, math.prod(shape)
    return typed[:, start : start + size].view(-1, *shape)
