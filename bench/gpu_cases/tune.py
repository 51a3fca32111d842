"""Times of launch parameters of decode and prefill attention, for bench/gpu.py --only tune.

Each row is one launch beside the picked one. The rows marked BEST say what pick_launch, SPLIT or pick_programs should
choose on this GPU. Launches that do not compile or do not fit are skipped.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.bench.gpu_cases.batch import Batch
from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.kernels.attention import paged_decode, paged_prefill
from coatcheck.kernels.gpu_properties import gpu_properties
from coatcheck.workers.core.kv_dtype import KvDtype

Try = tuple[str, Callable[[], object]]


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
        floor = batch.kv_bytes / roofs.copy
        yield from _best(f"decode, {what} of {dim}, {kv}", _decodes(batch, device), floor, device)
    for dim, kv in ((128, KvDtype.BFLOAT16), (64, KvDtype.BFLOAT16), (128, KvDtype.FP8)):
        batch = Batch([(8192, 8192)], 32, 8, dim, torch.bfloat16, kv, device)
        floor = 4 * (8192 * 8193 / 2) * 32 * dim / roofs.matrix
        yield from _best(f"prefill, 1 of 8k of {dim}, {kv}", _prefills(batch, device), floor, device)


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


def _decodes(batch: Batch, device: torch.device) -> Iterator[Try]:
    """The picked launch, then other tiles, splits and numbers of programs, one change at a time."""
    gpu, cache = gpu_properties(device), batch.cache
    group = batch.q.shape[1] // cache.kv_heads
    picked = paged_decode.pick_launch(group, cache.k.shape[3], batch.q.element_size(), cache.bits, gpu)
    out = torch.empty_like(batch.q)
    run = partial(_decode, batch, out)
    yield f"picked, {_describe(picked)}", run
    for keys, warps, stages in product((32, 64, 128), (4, 8), (3, 5, 7)):
        launch = picked._replace(block_n=keys, num_warps=warps, num_stages=stages)
        if launch != picked and keys >= 8 * warps:
            yield _describe(launch), partial(run, launch=launch)
    for split in (256, 1024):
        yield f"splits of {split}", partial(run, split=split)
    for programs in (2, 4, 8, 32):
        yield f"{programs} programs a processor", partial(run, programs=programs * gpu.processors)


def _decode(batch: Batch, out: Tensor, **overrides: object) -> None:
    total = sum(seq_len for _, seq_len in batch.lengths)
    paged_decode.launch_decode(
        batch.q, batch.cache, batch.tables, batch.seq_lens, batch.starts, batch.scale, 0, 0.0, None, out, total,
        **overrides,  # type: ignore[arg-type]
    )  # fmt: skip


def _prefills(batch: Batch, device: torch.device) -> Iterator[Try]:
    cache, longest = batch.cache, max(q for q, _ in batch.lengths)
    rows = longest * paged_prefill.pick_pack(batch.q.shape[1] // cache.kv_heads)
    dim = batch.q.shape[2]
    picked = paged_prefill.pick_launch(
        rows, dim, cache.k.shape[3], batch.q.element_size(), cache.is_quantised, gpu_properties(device)
    )  # fmt: skip
    out = torch.empty_like(batch.q)
    run = partial(
        paged_prefill.launch_prefill, batch.q, cache, batch.tables, batch.seq_lens, batch.starts, longest, batch.scale,
        0, 0.0, None, out, False, len(batch.lengths),
    )  # fmt: skip
    yield f"picked, {_describe(picked)}", run
    for queries, keys, warps, stages in (
        (128, 64, 8, 3), (128, 64, 8, 7), (128, 128, 8, 3), (128, 128, 8, 5), (64, 64, 4, 5), (64, 64, 4, 3),
        (64, 128, 4, 3), (128, 32, 8, 5), (128, 64, 4, 3), (64, 32, 4, 5),
    ):  # fmt: skip
        launch = picked._replace(block_m=queries, block_n=keys, num_warps=warps, num_stages=stages)
        if launch != picked:
            yield _describe(launch), partial(run, launch=launch)


def _describe(launch: paged_decode.DecodeLaunch | paged_prefill.PrefillLaunch) -> str:
    tile = f"{launch.block_m} rows by {launch.block_n} keys"
    return f"{tile}, {launch.num_warps} warps, {launch.num_stages} stages"
