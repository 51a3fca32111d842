"""The launch parameters of paged_tiles.py for any shape and GPU. Pure arithmetic.

Sequences with few queries have short tiles. The other sequences of a step have medium tiles if the rows of each fit in
64, else wide ones. In batch-invariant mode all tiles have one shape.
"""

from __future__ import annotations

from typing import NamedTuple

import triton  # type: ignore[import-untyped]

from coatcheck.kernels.attention.attention_plan import TileShape
from coatcheck.kernels.gpu_properties import GpuProperties

_MEDIUM_ROWS = 64
_Parameters = tuple[int, int, int, int, int]  # BLOCK_M, BLOCK_N, BLOCK_D, warps, stages
# Programs of a plan for each processor: no more than run at once, because a program that waits for a place ends late.
# Two with short tiles of heads of 128 fit into an H100's registers and shared memory; with three, decodes took up to
# 1.36 times as long.
_SHORT_PROGRAMS, _WIDE_PROGRAMS = 2, 2


class TileLaunch(NamedTuple):
    """`pack`: heads in a tile. `two_loops`: keys to which all queries attend are computed without a mask. `convert`:
    see GpuProperties. `is_capped`: the kernel is compiled with the branch of the softcap even without a softcap."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    pack: int
    two_loops: bool
    convert: int
    is_capped: bool
    shape: TileShape


class Tiles(NamedTuple):
    """The tiles of the layers of one kind."""

    short: TileLaunch
    medium: TileLaunch
    wide: TileLaunch
    batch_invariant: bool


def pick_tiles(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    element_size: int,
    pool_bits: int,
    gpu: GpuProperties,
    batch_invariant: bool = False,
) -> Tiles:
    """The tiles for layers of this shape. `element_size`: bytes of a query's element. `pool_bits`: bits of an element
    in the pool."""
    group = heads // kv_heads
    width = head_dim // 2 if pool_bits == 4 else head_dim  # elements in a row of the pool
    is_quantised = pool_bits < 8 * element_size

    def tile(parameters: _Parameters, pack: int, *, two_loops: bool) -> TileLaunch:
        block_m = parameters[0]
        programs = gpu.processors * (_WIDE_PROGRAMS if block_m > 32 else _SHORT_PROGRAMS)
        shape = TileShape(block_m // pack, heads // pack, programs)
        return TileLaunch(*parameters, pack, two_loops, gpu.prefill_convert, is_capped, shape)

    # The branch keeps the compiler from loading more operands than there are registers: without it heads of 256 over an
    # fp8 pool spilled 168 bytes on sm_90.
    is_capped = element_size == 4 or (is_quantised and head_dim > 128 and gpu.wide_tiles)
    pack = pick_pack(group)
    sizes = (head_dim, width, element_size, is_quantised, gpu)
    if batch_invariant:
        *parameters, num_warps, num_stages = _pick_wide(_MEDIUM_ROWS, *sizes)
        # Two results are held at once, so a thread has half as many rows as in the other mode.
        block_m, block_n, block_d = parameters
        num_warps = 8 if block_m == _MEDIUM_ROWS else num_warps
        one = tile((block_m, block_n, block_d, num_warps, num_stages), pack, two_loops=False)
        return Tiles(one, one, one, batch_invariant=True)
    medium, wide = (tile(_pick_wide(rows, *sizes), pack, two_loops=True) for rows in (_MEDIUM_ROWS, 1 << 30))
    short = tile(_pick_short(group, width, element_size, pool_bits, gpu), group, two_loops=False)
    return Tiles(short._replace(convert=gpu.convert, is_capped=False), medium, wide, batch_invariant=False)


def pick_pack(group: int) -> int:
    """The heads in a medium or wide tile: the largest divisor of `group`, the heads of a KV head, up to 16."""
    return max(pack for pack in range(1, 17) if group % pack == 0)


def _pick_short(group: int, width: int, element_size: int, pool_bits: int, gpu: GpuProperties) -> _Parameters:
    """The parameters of short tiles, with about 16 KiB of keys.

    The compiler pipelines the block numbers as well as the rows, so rows are prefetched only from five stages on. Two
    programs must fit into the shared memory of a processor.
    """
    block_d: int = max(16, triton.next_power_of_2(width))
    block_m: int = max(16, triton.next_power_of_2(group))
    row = block_d * max(1, pool_bits // 8)  # bytes of a key
    block_n = max(16, min(128, 16384 // row))
    halves = 2 if pool_bits == 4 else int(pool_bits < 8 * element_size)
    widened = halves * block_d * element_size  # bytes of a key's values once widened

    def fits(tiles: int, keys: int) -> bool:
        own = 3072 + block_m * (block_d + keys) * element_size + keys * widened
        return 2 * (own + 2 * tiles * keys * row) <= gpu.shared

    if not fits(2, block_n):
        block_n = max(16, block_n // 2)
    stages = 5 if fits(2, block_n) else 3 if fits(1, block_n) else 1
    if gpu.wide_tiles:  # otherwise triton 3.7.1 spills 8 to 24 bytes on sm_90; the times on a GPU are not measured yet
        if (element_size == 4 and block_d == 128) or (pool_bits == 4 and (width < block_d or block_d > 64)):
            block_n = max(16, block_n // 2)
        if element_size == 4:
            stages = min(stages, 3)
    return block_m, block_n, block_d, 4, min(stages, gpu.max_stages)


def _pick_wide(
    rows: int, head_dim: int, width: int, element_size: int, quantised: bool, gpu: GpuProperties
) -> _Parameters:
    """The parameters of medium and wide tiles: at most `rows` rows. Wide heads, float32 and quantised pools take more
    shared memory and registers, so their tiles are smaller."""
    block_d = max(16, triton.next_power_of_2(width))
    wide_head = triton.next_power_of_2(head_dim) > 128
    if element_size == 4:
        block_m, block_n, num_warps = 32 if wide_head else 64, 32, 8
    elif wide_head:
        block_m, block_n, num_warps = 128 if gpu.wide_tiles and not quantised else 64, 32, 8
    elif quantised and not gpu.wide_tiles:
        block_m, block_n, num_warps = 64, 32, 4
    else:
        block_m, block_n, num_warps = 128, 64, 8
    # Three key tiles are one being fetched, one in use, and one that a matrix product still reads.
    fits = {tiles: (block_m + 2 * tiles * block_n) * block_d * element_size <= gpu.shared for tiles in (2, 3)}
    stages = min(5 if fits[3] and element_size < 4 else 3 if fits[2] else 1, gpu.max_stages)
    if block_m > rows:
        block_m = rows
        num_warps = min(num_warps, 4)
    return block_m, block_n, block_d, num_warps, stages
