"""LoraTiles: the rows of a step that have an adapter, as integers on the device, for the kernels of shrink_expand.py.

A tile is up to BLOCK_M rows with one adapter. The host sorts the rows of a step by their adapter and divides them into
tiles. A step of given numbers of rows and adapters always has `num_tiles` tiles, which is enough for any choice of
adapters; those that it does not need are empty. So a CUDA graph launches the same programs in every step, and reads
which rows they compute.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# The height of every tile. If it grew with the step, a row would be computed by other instructions beside other rows.
# A rank is about as large as this, so a tile's rows of x take as many bytes as its rows of A.
BLOCK_M: Final = 16
_FIELDS: Final = 3


class LoraTiles(NamedTuple):
    """`order`: int32 [rows], the rows that have an adapter, sorted by adapter, then zeros. `tiles`: int32 [num_tiles,
    3], of each tile: its adapter, from 0, or -1 for an empty tile, and the first and the end of its places in `order`.
    """

    order: Tensor
    tiles: Tensor


def num_tiles(rows: int, num_adapters: int) -> int:
    """The tiles of a step: each adapter has at most one tile that is not full."""
    return min(rows, rows // BLOCK_M + num_adapters)


def num_ints(rows: int, num_adapters: int) -> int:
    """The size of the array that `pack_tiles` returns."""
    return rows + _FIELDS * num_tiles(rows, num_adapters)


def pack_tiles(row_adapters: NDArray[np.int32], num_adapters: int) -> NDArray[np.int32]:
    """What `view_tiles` divides: int32 [num_ints]. `row_adapters`: int32 [rows], the number of each row's adapter,
    counted from 1; 0 for a row without an adapter."""
    rows = len(row_adapters)
    packed = np.zeros(num_ints(rows, num_adapters), np.int32)
    tiles = packed[rows:].reshape(-1, _FIELDS)
    tiles[:, 0] = -1
    if not row_adapters.any():
        return packed
    order = np.argsort(row_adapters, kind="stable")
    first, made = int(np.count_nonzero(row_adapters == 0)), 0
    packed[: rows - first] = order[first:]
    counts = np.bincount(row_adapters[order[first:]], minlength=num_adapters + 1)
    place = 0
    for number in np.flatnonzero(counts).tolist():
        end = place + int(counts[number])
        for start in range(place, end, BLOCK_M):
            tiles[made] = number - 1, start, min(start + BLOCK_M, end)
            made += 1
        place = end
    return packed


def view_tiles(packed: Tensor, rows: int) -> LoraTiles:
    """`packed`: int32 [num_ints], what `pack_tiles` returned for `rows` rows, on the device."""
    return LoraTiles(packed[:rows], packed[rows:].view(-1, _FIELDS))
