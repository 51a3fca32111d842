"""Which tokens of a step a program of linear attention has, found on the device.

A step is T tokens of S sequences; lengths are known only on the device when a CUDA graph is replayed. So each kernel is
launched for the largest number of tiles that T tokens can have, and a program finds its sequence in cu_seqlens by
bisection. Programs beyond the last tile of a sequence return.

Sequence s has its tiles of SIZE tokens from number

    cu_seqlens[s] // SIZE + s                                   LEAST 0: sequences of any length have tiles
    cu_seqlens[s] // SIZE + cu_seqlens[s] // LEAST              only sequences of at least LEAST tokens have tiles

on. Both leave room for the ceil(n / SIZE) tiles of a sequence of n tokens, the second because LEAST <= SIZE: then
floor(n / SIZE) + floor(n / LEAST) >= ceil(n / SIZE) for every n >= LEAST.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


def count_tiles(tokens: int, sequences: int, size: int, least: int = 0) -> int:
    """The largest number of tiles that `tokens` tokens of `sequences` sequences can have, gaps included."""
    return tokens // size + (tokens // least if least else sequences)


@triton.jit
def _first_tile(start, sequence, SIZE: tl.constexpr, LEAST: tl.constexpr):
    """The number of the first tile of a sequence whose first token is `start`."""
    if LEAST > 0:
        return start // SIZE + start // LEAST
    else:
        return start // SIZE + sequence


@triton.jit
def _find_sequence(cu_seqlens, tile, sequences, SIZE: tl.constexpr, LEAST: tl.constexpr):
    """The last sequence whose first tile is not behind `tile`."""
    low = tile * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = _first_tile(tl.load(cu_seqlens + middle), middle, SIZE, LEAST) > tile
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, middle)
    return low
