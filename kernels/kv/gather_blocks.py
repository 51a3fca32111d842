"""Whole blocks out of a pool into a dense buffer, and back: what a tier moves in one piece.

    gather    out[i] = pool[blocks[i]]
    scatter   pool[blocks[i]] = rows[i]

Shapes: pool uint8 [num_blocks, bytes_per_block], out and rows uint8 [n, bytes_per_block], each with dense blocks at any
stride, blocks int64 [n], for scatter without repetition. All on one device. One program copies a stretch of one block
(the device function is copy_blocks.py's). The file does not know what becomes of the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.arch import takes_triton
from coatcheck.kernels.kv.copy_blocks import launch_copy_blocks
from coatcheck.kernels.launch_check import want_contiguous, want_device, want_dtype, want_rows, want_shape


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor | None = None) -> Tensor:
    want_shape("pool", pool, (None, None))
    if out is None:
        out = pool.new_empty((len(blocks), pool.shape[1]))
    _check(pool, blocks, "out", out)
    if takes_triton(pool):
        launch_copy_blocks(pool, out, blocks, None, len(blocks))
        return out
    library = native.library()
    if library is None or pool.device.type != "cpu":
        return out.copy_(pool[blocks])
    library.copy_blocks(
        pool.data_ptr(), pool.stride(0), blocks.data_ptr(), out.data_ptr(), out.stride(0), 0, pool.shape[1], len(blocks)
    )  # fmt: skip
    return out


def scatter_blocks(rows: Tensor, pool: Tensor, blocks: Tensor) -> None:
    want_shape("pool", pool, (None, None))
    _check(pool, blocks, "rows", rows)
    if takes_triton(pool):
        return launch_copy_blocks(rows, pool, None, blocks, len(blocks))
    library = native.library()
    if library is None or pool.device.type != "cpu":
        pool[blocks] = rows
        return
    library.copy_blocks(
        rows.data_ptr(), rows.stride(0), 0, pool.data_ptr(), pool.stride(0), blocks.data_ptr(), pool.shape[1],
        len(blocks),
    )  # fmt: skip


def _check(pool: Tensor, blocks: Tensor, name: str, rows: Tensor) -> None:
    want_shape("blocks", blocks, (None,))
    want_dtype("blocks", blocks, torch.int64)
    want_contiguous("blocks", blocks)
    want_shape(name, rows, (len(blocks), pool.shape[1]))
    for label, tensor in (("pool", pool), (name, rows)):
        want_dtype(label, tensor, torch.uint8)
        want_rows(label, tensor)
    want_device("blocks", blocks, pool.device)
    want_device(name, rows, pool.device)
