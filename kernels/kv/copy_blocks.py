"""pool[dst[i]] = pool[src[i]] for whole blocks: the copy of copy-on-write.

Shapes: pool uint8 [num_blocks, bytes_per_block] (a block is dense, across all layers), src, dst int64 [n]. No block
may be both a source and a destination, nor a destination twice: the copies run in no particular order. One program
copies a stretch of one block. The file does not know who shares a block.
"""

# Device functions are a language of their own inside Python: their arguments are pointers and constants, not objects.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.arch import takes_triton
from coatcheck.kernels.launch_check import want_contiguous, want_device, want_dtype, want_rows, want_shape


@triton.jit(do_not_specialize=["src", "dst"])
def _copy_blocks(
    source, target, src, dst, source_stride, target_stride, width,
    LISTED: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Between two pools, or within one; not LISTED: block i is the source, not PLACED: the target."""
    pair = tl.program_id(0).to(tl.int64)
    block, place = pair, pair
    if LISTED:
        block = tl.load(src + pair)
    if PLACED:
        place = tl.load(dst + pair)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    tl.store(target + place * target_stride + at, tl.load(source + block * source_stride + at, mask), mask)


def launch_copy_blocks(source: Tensor, target: Tensor, src: Tensor | None, dst: Tensor | None, count: int) -> None:
    if count == 0:
        return
    # Eight bytes at a time where blocks allow it, which every layout's do.
    if all(size % 8 == 0 for pool in (source, target) for size in (pool.shape[1], pool.stride(0))):
        source, target = source.view(torch.int64), target.view(torch.int64)
    width = source.shape[1]
    _copy_blocks[(count, -(-width // 2048))](
        source, target, source if src is None else src, target if dst is None else dst,
        source.stride(0), target.stride(0), width,
        LISTED=src is not None, PLACED=dst is not None, BLOCK=2048, num_warps=4,
    )  # fmt: skip


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    _check(pool, src, dst)
    if takes_triton(pool):
        return launch_copy_blocks(pool, pool, src, dst, len(src))
    library = native.library()
    if library is None or pool.device.type != "cpu":
        return copy_blocks_reference(pool, src, dst)
    library.copy_blocks(
        pool.data_ptr(), pool.stride(0), src.data_ptr(), pool.data_ptr(), pool.stride(0), dst.data_ptr(),
        pool.shape[1], len(src),
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
