"""pool[dst[i]] = pool[src[i]] for whole blocks: the copy of copy-on-write.

Shapes: pool uint8 [num_blocks, bytes_per_block] (a block is dense, across all layers), src, dst int64 [n]. No block
may be both a source and a destination, nor a destination twice: the copies run in no particular order. One program
copies a stretch of one block. The file does not know who shares a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .launch_check import want_contiguous, want_device, want_dtype, want_rows, want_shape


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    _check(pool, src, dst)
    library = native.library()
    if library is None or pool.device.type != "cpu":
        return copy_blocks_reference(pool, src, dst)
    library.copy_blocks(
        pool.data_ptr(), pool.stride(0), pool.shape[1], src.data_ptr(), dst.data_ptr(), src.shape[0]
    )  # fmt: skip


def _check(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    want_shape("pool", pool, (None, None))
    want_dtype("pool", pool, torch.uint8)
    want_rows("pool", pool)
    want_shape("src", src, (None,))
    want_shape("dst", dst, (src.shape[0],))
    for name, index in (("src", src), ("dst", dst)):
        want_dtype(name, index, torch.int64)
        want_contiguous(name, index)
        want_device(name, index, pool.device)


def copy_blocks_reference(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    pool[dst] = pool[src]
