"""Copies whole blocks between two pools in CPU memory, and computes a checksum of each block.

    to[to_rows[i]] = from[from_rows[i]]
    sums[i] = sum_l ( P_l * sum_r w[r, l]  +  Q_l * sum_r (R - r) * w[r, l] )  modulo 2^64,    P_l odd, Q_l even

w[r, l] are the words of block i as little-endian int64: R rows r of 64 bytes with eight lanes l. The coefficient of
every word is odd, so a change within one word always changes the sum. A change of several words is missed with a
probability of 2^-64. The sum is computed during the copy, and takes little more time than the copy alone.

`sum_blocks` computes only the sums, also of blocks on a GPU. There one program adds a part of a block. The parts are
then added in any order, because integer addition wraps.

Shapes: from, to uint8 [num_blocks, bytes_per_block] (bytes_per_block is a multiple of 64); from_rows, to_rows, sums
int64 [n]. No block may be a destination twice.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import sys

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_device, check_dtype, check_rows, check_shape, refuse

_CPU = torch.device("cpu")
_LANES = 8
_CACHE_LINE = 8 * _LANES
_P, _Q = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4E))
_SIGNED_P, _SIGNED_Q = tl.constexpr(_P), tl.constexpr(_Q)
_WORDS = 4096  # words that a program adds


def transfer_blocks(source: Tensor, from_rows: Tensor, target: Tensor, to_rows: Tensor) -> Tensor:
    _check_pool("source", source, "from_rows", from_rows)
    _check_pool("target", target, "to_rows", to_rows)
    check_shape("target", target, (None, source.shape[1]))
    check_shape("to_rows", to_rows, (from_rows.shape[0],))
    library = native.library()
    if library is None:
        return transfer_blocks_reference(source, from_rows, target, to_rows)
    sums = torch.empty_like(from_rows)
    library.transfer_blocks(
        source.data_ptr(), source.stride(0), from_rows.data_ptr(),
        target.data_ptr(), target.stride(0), to_rows.data_ptr(),
        source.shape[1], from_rows.shape[0], sums.data_ptr(),
    )  # fmt: skip
    return sums


def sum_blocks(pool: Tensor, rows: Tensor) -> Tensor:
    """The checksums of `transfer_blocks`, without a copy: int64 [n]. `pool`, `rows`: on a CPU or a GPU."""
    _check_pool("pool", pool, "rows", rows, pool.device)
    if uses_triton(pool):
        return _sum_on_gpu(pool.view(torch.int64), rows)
    library = native.library()
    if library is None:
        return _sums(pool[rows])
    sums = torch.empty_like(rows)
    library.transfer_blocks(
        pool.data_ptr(), pool.stride(0), rows.data_ptr(), 0, 0, rows.data_ptr(),
        pool.shape[1], rows.shape[0], sums.data_ptr(),
    )  # fmt: skip
    return sums


def _sum_on_gpu(pool: Tensor, rows: Tensor) -> Tensor:
    """`pool`: int64 [num_blocks, words]."""
    words = pool.shape[1]
    parts = torch.empty((len(rows), triton.cdiv(words, _WORDS)), dtype=torch.int64, device=pool.device)
    if len(rows):
        _sum_blocks[tuple(parts.shape)](pool, rows, parts, pool.stride(0), words, BLOCK=_WORDS, num_warps=8)
    return parts.sum(1)


@triton.jit(do_not_specialize=["rows"])
def _sum_blocks(pool, rows, parts, stride, words, BLOCK: tl.constexpr):
    """One program adds BLOCK words of one block."""
    row = tl.load(rows + tl.program_id(0))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has = at < words
    word = tl.load(pool + row * stride + at, has, other=0)
    lane, line = (at % 8).to(tl.int64), (at // 8).to(tl.int64)
    coefficient = 2 * lane + _SIGNED_P + (words // 8 - line) * (4 * lane + _SIGNED_Q)
    total = tl.sum(word * coefficient, 0)
    tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)


def _check_pool(name: str, pool: Tensor, rows_name: str, rows: Tensor, device: torch.device = _CPU) -> None:
    check_shape(name, pool, (None, None))
    if pool.shape[1] % _CACHE_LINE:
        refuse(name, f"blocks of a multiple of {_CACHE_LINE} bytes", pool.shape[1])
    check_dtype(name, pool, torch.uint8)
    check_rows(name, pool)
    check_device(name, pool, device)
    check_dense(rows_name, rows, (None,), torch.int64, device)


def transfer_blocks_reference(source: Tensor, from_rows: Tensor, target: Tensor, to_rows: Tensor) -> Tensor:
    blocks = source[from_rows]
    target[to_rows] = blocks
    return _sums(blocks)


def _sums(blocks: Tensor) -> Tensor:
    assert sys.byteorder == "little", "words are little-endian"
    words = blocks.view(torch.int64).reshape(len(blocks), blocks.shape[1] // _CACHE_LINE, _LANES)
    lanes, rows = torch.arange(_LANES), torch.arange(words.shape[1], 0, -1)
    weighted = (words * rows[:, None]).sum(1)
    return (words.sum(1) * (2 * lanes + _P) + weighted * (4 * lanes + _Q)).sum(1)
