"""Maps the programs of a kernel to tiles of SIZE tokens of one sequence, on the device.

A step has T tokens of S sequences. When a CUDA graph is replayed, only the device knows the sequences' lengths. So a
kernel is launched for the most tiles that T tokens of S sequences can have, and each program finds its sequence in
cu_seqlens by bisection (`_locate_tile`). A program whose tile lies past the end of its sequence returns.

The first tile of sequence s has the number

    cu_seqlens[s] // SIZE + s                                   MIN_TOKENS 0: sequences of any length have tiles
    cu_seqlens[s] // SIZE + cu_seqlens[s] // MIN_TOKENS         only sequences of MIN_TOKENS tokens or more have tiles

These numbers never collide. A sequence of n tokens needs ceil(n / SIZE) tiles. In the first form the number of the next
sequence is larger by floor(n / SIZE) + 1 or more, in the second by floor(n / SIZE) + floor(n / MIN_TOKENS) or more.
Both are at least ceil(n / SIZE), in the second form for every n >= MIN_TOKENS, because MIN_TOKENS <= SIZE.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


def count_tiles(tokens: int, sequences: int, size: int, min_tokens: int = 0) -> int:
    """The most tile numbers that `tokens` tokens of `sequences` sequences can take, unused numbers included."""
    return tokens // size + (tokens // min_tokens if min_tokens else sequences)


@triton.jit
def _locate_tile(cu_seqlens, tile, sequences, SIZE: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """(sequence, first, count, start) of the tile with the number `tile`.

    `sequence`: index of the tile's sequence. `first`, `count`: the row of the sequence's first token in the step, and
    how many tokens it has there. `start`: the tile's first token, counted from `first`; 0 in a sequence's first tile.
    A tile with start >= count has no tokens. With MIN_TOKENS, nor has one with count < MIN_TOKENS.
    """
    sequence = _find_sequence(cu_seqlens, tile, sequences, SIZE, MIN_TOKENS)
    first = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - first
    return sequence, first, count, (tile - _first_tile(first, sequence, SIZE, MIN_TOKENS)) * SIZE


@triton.jit
def _first_tile(start, sequence, SIZE: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """The number of the first tile of a sequence whose first token is `start`."""
    if MIN_TOKENS > 0:
        return start // SIZE + start // MIN_TOKENS
    else:
        return start // SIZE + sequence


@triton.jit
def _find_sequence(cu_seqlens, tile, sequences, SIZE: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """The last sequence whose first tile has the number `tile` or a smaller one."""
    low = tile * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = _first_tile(tl.load(cu_seqlens + middle), middle, SIZE, MIN_TOKENS) > tile
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, middle)
    return low
