"""The KV pool's tensors: one rank's memory for blocks, and each layer's view of it.

It knows the layout and the device; it does not know which block is whose.
"""

from typing import Final

import torch
from torch import Tensor

from .block_layout import BlockLayout
from .kv_dtype import KvDtype

_TORCH: Final = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


def allocate_pool(layout: BlockLayout, num_blocks: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, bytes_per_block], zeroed so that every page is ours from the start."""
    return torch.zeros(num_blocks, layout.bytes_per_block, dtype=torch.uint8, device=device)


def layer_caches(layout: BlockLayout, pool: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(K, V) of each layer: [num_blocks, kv_heads, block_size, head_dim], strided over the pool."""
    typed = pool.view(_TORCH[layout.kv_dtype])
    size, caches = layout.block_size, []
    for slab in layout.slabs:
        heads, dim = slab.num_kv_heads, slab.head_dim
        shape, strides = (typed.shape[0], heads, size, dim), (typed.stride(0), size * dim, dim, 1)
        start = typed.storage_offset()
        k, v = (typed.as_strided(shape, strides, start + at // typed.itemsize) for at in (slab.k_offset, slab.v_offset))
        caches.append((k, v))
    return caches
