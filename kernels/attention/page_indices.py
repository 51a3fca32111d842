"""Gathers the used entries of a block table: indices[indptr[s] + i] = block_tables[s, i]. FlashInfer reads pages so.

Shapes: block_tables int32 [num_seqs, max_blocks] with contiguous rows; indptr int32 [num_seqs + 1], ascending from 0;
row s has indptr[s + 1] - indptr[s] used entries; indices int32 [at least indptr[-1]], of which the first indptr[-1] are
written. The host does not wait for the device, so a CUDA graph can capture the launch.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from itertools import pairwise

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import uses_triton

_BLOCK = 1024


@triton.jit(do_not_specialize=["block_tables", "indptr", "indices", "stride"])
def _gather_pages(block_tables, indptr, indices, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - first
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        blocks = tl.load(block_tables + row.to(tl.int64) * stride + at, at < count)
        tl.store(indices + first + at, blocks, at < count)


def gather_pages(block_tables: Tensor, indptr: Tensor, indices: Tensor) -> None:
    """Write the used entries of `block_tables` to `indices`."""
    if uses_triton(indices):
        _gather_pages[(len(block_tables),)](
            block_tables, indptr, indices, block_tables.stride(0), BLOCK=_BLOCK, num_warps=4
        )
        return
    for row, (first, end) in enumerate(pairwise(indptr.tolist())):
        indices[first:end] = block_tables[row, : end - first]
