"""Times of launch parameters of attention, for bench/gpu.py --only tune.

Each row is one launch beside the picked one. The rows marked BEST say what pick_tiles should choose on this
GPU. Launches that do not compile or do not fit are skipped.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import torch
import triton  # type: ignore[import-untyped]

from coatcheck.bench.gpu_cases.batch import Batch
from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.kernels.attention.tile_launch import TileLaunch, Tiles
from coatcheck.workers.core.kv_dtype import KvDtype

Try = tuple[str, Callable[[], object]]
# Rows, keys, warps, stages.
_WIDE = (
    (128, 64, 8, 3), (128, 64, 8, 7), (128, 128, 8, 3), (128, 128, 8, 5), (64, 64, 4, 5), (64, 64, 4, 3),
    (64, 128, 4, 3), (128, 32, 8, 5), (128, 64, 4, 3), (64, 32, 4, 5),
)  # fmt: skip
_MEDIUM = ((64, 64, 4, 3), (64, 64, 8, 5), (64, 32, 4, 5), (64, 128, 4, 3), (128, 64, 8, 5))


def tune(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """The shapes that have targets; the slowest last."""
    if device.type == "cpu":
        return  # there is nothing to launch
    for what, lengths, dim, kv in (
        ("64 of 4k", [(1, 4096)] * 64, 128, KvDtype.BFLOAT16),
        ("64 of 4k", [(1, 4096)] * 64, 128, KvDtype.FP8),
        ("64 of 2k", [(1, 2048)] * 64, 64, KvDtype.BFLOAT16),
        ("1 of 32k", [(1, 32768)], 128, KvDtype.BFLOAT16),
    ):
        batch = Batch(lengths, 32, 8, dim, torch.bfloat16, kv, device)
        floor = batch.kv_bytes / roofs.memory
        changes = [
            (batch.tiles().short.block_m, keys, warps, stages)
            for keys, warps, stages in product((32, 64, 128), (4, 8), (3, 5, 7))
            if keys >= 8 * warps
        ]
        yield from _best(f"decode, {what} of {dim}, {kv}", _tries(batch, "short", changes), floor, device)
    for dim, kv in ((128, KvDtype.BFLOAT16), (64, KvDtype.BFLOAT16), (128, KvDtype.FP8)):
        batch = Batch([(8192, 8192)], 32, 8, dim, torch.bfloat16, kv, device)
        floor = 4 * (8192 * 8193 / 2) * 32 * dim / roofs.matrix
        yield from _best(f"prefill, 1 of 8k of {dim}, {kv}", _tries(batch, "wide", _WIDE), floor, device)
    for context in (32768, 102400):
        batch = Batch([(16, context)], 32, 8, 128, torch.bfloat16, KvDtype.BFLOAT16, device)
        floor = batch.kv_bytes / roofs.memory
        yield from _best(f"16 behind {context}", _tries(batch, "medium", _MEDIUM), floor, device)


def _best(what: str, tries: Iterator[Try], floor: float, device: torch.device) -> Iterator[Measurement]:
    found: list[tuple[float, str]] = []
    for name, work in tries:
        try:
            work()
            took = seconds(work, device, times=3)
        except (triton.OutOfResources, RuntimeError) as error:  # too much shared memory, or the compiler gives up
            yield Measurement("tune", f"{what}: {name}", note=f"skipped: {str(error).splitlines()[0][:120]}")
            continue
        found.append((took, name))
        yield Measurement(
            "tune", f"{what}: {name}", took * 1e3, floor / took, beside="picked", beside_ms=found[0][0] * 1e3
        )
    if found:
        took, name = min(found)
        yield Measurement(
            "tune", f"{what}: BEST {name}", took * 1e3, floor / took, beside="picked", beside_ms=found[0][0] * 1e3
        )


def _tries(batch: Batch, kind: str, changes: Iterable[tuple[int, int, int, int]]) -> Iterator[Try]:
    """The picked tiles of a kind, then others (rows, keys, warps, stages), then other numbers of programs."""
    tiles = batch.tiles()
    picked: TileLaunch = getattr(tiles, kind)
    yield f"picked, {_describe(picked)}", partial(batch.run, tiles=tiles)
    for rows, keys, warps, stages in changes:
        shape = picked.shape._replace(queries=rows // picked.pack)
        tile = picked._replace(block_m=rows, block_n=keys, num_warps=warps, num_stages=stages, shape=shape)
        if tile != picked:
            yield _describe(tile), partial(batch.run, tiles=_with_tile(tiles, kind, tile))
    processors = picked.shape.programs
    for tenths in (5, 15, 20, 40):
        shape = picked.shape._replace(programs=processors * tenths // 10)
        tile = picked._replace(shape=shape)
        yield f"{shape.programs} programs", partial(batch.run, tiles=_with_tile(tiles, kind, tile))


def _with_tile(tiles: Tiles, kind: str, tile: TileLaunch) -> Tiles:
    short, medium, wide = (tile if name == kind else getattr(tiles, name) for name in ("short", "medium", "wide"))
    return Tiles(short, medium, wide, tiles.batch_invariant)


def _describe(tile: TileLaunch) -> str:
    return f"{tile.block_m} rows by {tile.block_n} keys, {tile.num_warps} warps, {tile.num_stages} stages"
