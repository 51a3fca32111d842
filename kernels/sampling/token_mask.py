"""logits[rows[i], t] = -inf if bit t % 32 of mask[i, t // 32] is 0, in place.

Shapes: logits float32 [R, V], rows int64 [n] without repetition, mask int32 [n, ceil(V / 32)]. One program masks a part
of one row.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_logits

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _token_mask(logits, rows, mask, stride, words, vocab, BLOCK: tl.constexpr):
    masked = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + masked)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    bits = tl.load(mask + masked * words + at // 32, inside, other=-1)
    forbidden = (bits >> (at % 32)) & 1 == 0
    tl.store(logits + row * stride + at, float("-inf"), inside & forbidden)


def apply_token_mask(logits: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Change `logits` in place and return it. Raises LaunchRefused."""
    check_logits(logits)
    vocab = logits.shape[1]
    check_dense("rows", rows, (None,), torch.int64, logits.device)
    check_dense("mask", mask, (rows.shape[0], -(-vocab // 32)), torch.int32, logits.device)
    library = native.library_for(logits)
    if library is not None:
        library.token_mask(
            logits.data_ptr(), logits.stride(0), vocab, rows.data_ptr(), len(rows), mask.data_ptr(), mask.shape[1]
        )
    elif not uses_triton(logits):
        apply_token_mask_reference(logits, rows, mask)
    elif len(rows) * vocab:
        _token_mask[(len(rows), -(-vocab // _BLOCK))](
            logits, rows, mask, logits.stride(0), mask.shape[1], vocab, BLOCK=_BLOCK, num_warps=4
        )
    return logits


def apply_token_mask_reference(logits: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -math.inf)
    return logits
