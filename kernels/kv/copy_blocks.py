"""Copies whole blocks within the pool, for copy-on-write: pool[dst[i]] = pool[src[i]].

Shapes: pool uint8 [num_blocks, bytes_per_block] (blocks are contiguous), src, dst int64 [n]. The copies run in no
particular order. So no block may be both a source and a destination, or a destination twice. One program copies a part
of one block.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_rows, check_shape


@triton.jit(do_not_specialize=["src", "dst"])
def _copy_blocks(pool, src, dst, stride, width, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    source, target = tl.load(src + pair), tl.load(dst + pair)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    tl.store(pool + target * stride + at, tl.load(pool + source * stride + at, mask), mask)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    _check(pool, src, dst)
    library = native.library()
    if uses_triton(pool):
        _launch(pool, src, dst)
    elif library is None or pool.device.type != "cpu":
        pool[dst] = pool[src]
    else:
        library.copy_blocks(pool.data_ptr(), pool.stride(0), src.data_ptr(), dst.data_ptr(), pool.shape[1], len(src))


def _launch(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    if len(src) == 0:
        return
    # Eight bytes at a time if the block size allows it. The blocks of a BlockLayout do.
    if pool.shape[1] % 8 == 0 and pool.stride(0) % 8 == 0:
        pool = pool.view(torch.int64)
    width = pool.shape[1]
    _copy_blocks[(len(src), -(-width // 2048))](pool, src, dst, pool.stride(0), width, BLOCK=2048, num_warps=4)


def _check(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    check_shape("pool", pool, (None, None))
    check_dtype("pool", pool, torch.uint8)
    check_rows("pool", pool)
    check_dense("src", src, (None,), torch.int64, pool.device)
    check_dense("dst", dst, (src.shape[0],), torch.int64, pool.device)
