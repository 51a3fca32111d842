"""Paged attention, over pools of every kind; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.attention.paged_tiles import AttentionPlan, launch_attention, make_plan
from coatcheck.kernels.attention.tile_launch import TileLaunch, Tiles, pick_tiles
from coatcheck.kernels.gpu_properties import gpu_properties
from tests.kernels.attention_batch import Batch, close
from tests.kernels.caches import QUANTISED
from tests.kernels.triton.agreement import SENTINEL

Dtypes = tuple[torch.dtype, ...]
Options = tuple[float, int, float, Tensor | None]  # scale, window, cap, sinks


def tiles_of(batch: Batch, programs: int | None = None, *, batch_invariant: bool = False) -> Tiles:
    """The picked tiles. `programs`: as if the GPU ran so many at once."""
    q, cache, *_ = batch.arguments()
    picked = pick_tiles(
        q.shape[1], cache.kv_heads, cache.head_dim, element_size=q.element_size(), pool_bits=cache.bits,
        gpu=gpu_properties(q.device), batch_invariant=batch_invariant,
    )  # fmt: skip

    def limited(tile: TileLaunch) -> TileLaunch:
        return tile if programs is None else tile._replace(shape=tile.shape._replace(programs=programs))

    return Tiles(limited(picked.short), limited(picked.medium), limited(picked.wide), batch_invariant)


def plan_of(batch: Batch, tiles: Tiles, window: int) -> AttentionPlan:
    q_lens = batch.cu_seqlens_q.diff().tolist()
    return make_plan(q_lens, batch.seq_lens.tolist(), tiles, window, batch.q.device)


def launch(batch: Batch, options: Options, out: Tensor, tiles: Tiles | None = None, q: Tensor | None = None) -> None:
    plan = plan_of(batch, tiles or tiles_of(batch), options[1])
    launch_attention(batch.q if q is None else q, batch.cache, batch.block_tables, plan, *options, out)


def attention(first: torch.dtype = torch.float32, *others: torch.dtype) -> None:
    """Three shapes in the first dtype and the last shape in the others, with a GPU's programs and with 3."""
    lengths = [(1, 1), (1, 15), (16, 16), (1, 17), (5, 257), (1, 600), (0, 0), (20, 533), (40, 40)]
    shapes = ((6, 2, 32, 0, 0.0, False), (4, 4, 16, 13, 5.0, True), (3, 1, 80, 20, 0.0, True))
    for dtype in (first, *others):
        for heads, kv_heads, dim, window, softcap, with_sinks in shapes if dtype == first else shapes[-1:]:
            batch = Batch(lengths, heads, kv_heads, dim, dtype)
            sinks = torch.randn(heads) if with_sinks else None
            want = batch.reference(window, softcap, sinks)
            for programs in (None, 3):
                out = torch.full(batch.q.shape, SENTINEL).to(dtype)
                launch(batch, (batch.scale, window, softcap, sinks), out, tiles_of(batch, programs))
                close(out, want)


def batch_invariant(dtypes: Dtypes = (torch.float32, torch.float16), quantised: torch.dtype = torch.float32) -> None:
    """A query has the same bits alone, in a short chunk and in a whole prompt, with neighbours and without, with its
    keys divided among programs and by one program; over int8 as `quantised`."""
    length = 600
    for dtype, pool in (*zip(dtypes, dtypes, strict=True), (quantised, torch.int8)):
        every = ((0, 0.0, torch.randn(2)), (540, 5.0, None))
        for window, softcap, sinks in every if dtype == dtypes[0] == pool else every[1:]:
            whole = Batch([(length, length), (3, 20)], 2, 1, 32, dtype, 16, pool)
            options = (whole.scale, window, softcap, sinks)
            want, have = torch.empty_like(whole.q), torch.empty_like(whole.q)
            one = tiles_of(whole, 1, batch_invariant=True)
            launch(whole, options, want, one)
            assert plan_of(whole, one, window).space.slots == 0
            numbers = []
            for first, last in ((0, 1), (1, 40), (530, 531), (560, 599), (599, 600)):
                for programs in (1, None):
                    part = tiles_of(whole, programs, batch_invariant=True)
                    plan = make_plan([last - first], [last], part, window, whole.q.device)
                    numbers.append(plan.space.slots)
                    rows = whole.q[first:last].contiguous()
                    launch_attention(rows, whole.cache, whole.block_tables[:1], plan, *options, have[first:last])
                    assert torch.equal(have[first:last], want[first:last]), (dtype, pool, window, first, programs)
            assert max(numbers) > 0, "no keys were divided: this proves nothing"
            close(want, whole.reference(window, softcap, sinks))


DIMS = (64, 80, 96, 128, 256)
POOLS = (torch.float32, torch.float16, *QUANTISED)
HEADS = ((2, 2), (4, 2), (3, 1))  # MHA, GQA, MQA
OPTIONS = ((0, 0.0, False), (13, 0.0, False), (0, 5.0, False), (0, 0.0, True), (20, 5.0, True))  # window, cap, sinks


def matrix(whole: bool = False, pools: Dtypes = POOLS) -> None:
    """Every head size with every pool, and a sample of the other features; `whole`: every combination."""
    for d, dim in enumerate(DIMS):
        for p, pool in enumerate(pools):
            for h, heads in enumerate(HEADS):
                for o, options in enumerate(OPTIONS):
                    if whole or (h == (d + p) % len(HEADS) and o == (d + 2 * p) % len(OPTIONS)):
                        window, cap, with_sinks = options
                        cell(dim, pool, *heads, window, cap, with_sinks, size=(8, 16, 32)[(d + p + o) % 3])


def cell(
    dim: int, pool: torch.dtype, heads: int, kv_heads: int, window: int, softcap: float, with_sinks: bool, size: int
) -> None:
    """Decodes and a chunk in one batch: a full last block, a last block of one token, a shared prefix, unused rows."""
    dtype = pool if pool in (torch.float16, torch.bfloat16) else torch.float32
    batch = Batch([(1, 2 * size + 1), (18, 33), (1, size), (0, 0)], heads, kv_heads, dim, dtype, size, pool)
    batch.block_tables[2] = batch.block_tables[0]
    sinks = torch.randn(heads) if with_sinks else None
    out = torch.full((len(batch.q) + 2, heads, dim), SENTINEL).to(dtype)
    launch(batch, (batch.scale, window, softcap, sinks), out, q=torch.cat((batch.q, batch.q[:2])))
    assert (out[len(batch.q) :] == SENTINEL).all(), "a row past the last sequence was written"
    close(out[: len(batch.q)], batch.reference(window, softcap, sinks))


def long() -> None:
    """Many splits and one key, splits outside of a window, and sequences without tokens or keys."""
    batch = Batch([(1, 4097), (2, 513), (16, 2000)], 2, 1, 64, torch.float32)
    for window in (0, 600):
        out = torch.full(batch.q.shape, SENTINEL)
        launch(batch, (batch.scale, window, 0.0, None), out)
        assert plan_of(batch, tiles_of(batch), window).space.merges > 2
        close(out, batch.reference(window))
    empty = Batch([], 2, 1, 64, torch.float32)
    launch(empty, (1.0, 0, 0.0, None), empty.q)
    padding = Batch([(1, 0), (1, 3)], 2, 1, 64, torch.float32)
    out = torch.full(padding.q.shape, SENTINEL)
    launch(padding, (1.0, 0, 0.0, None), out)
    assert (out[0] == 0).all(), "a query over no keys must give zeros"


def quantised(one: torch.dtype = torch.float32, other: torch.dtype = torch.float16) -> None:
    """Decodes and chunks over pools of every other dtype."""
    lengths: Sequence[tuple[int, int]] = [(1, 1), (1, 17), (9, 33), (1, 530), (9, 600)]
    for kv in QUANTISED:
        broken(one, kv)
    for kv in (*QUANTISED, torch.float16):
        for dtype, (heads, kv_heads, dim, window, softcap) in (
            (one, (6, 2, 32, 0, 0.0)),
            (other, (3, 1, 80, 20, 5.0)),
        ):
            batch = Batch(list(lengths), heads, kv_heads, dim, dtype, kv=kv)
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            launch(batch, (batch.scale, window, softcap, None), out)
            close(out, batch.reference(window, softcap))


def broken(dtype: torch.dtype, kv: torch.dtype) -> None:
    """A key or a value that is NaN makes its sequence NaN, with a soft-cap too. Memory behind a sequence may be NaN."""
    batch = Batch([(1, 40), (1, 33), (1, 600)], 2, 1, 32, dtype, kv=kv)
    nth, row = divmod(20, batch.cache.block_size)
    block = int(batch.block_tables[0, nth])
    for scales in (batch.cache.k_scales, batch.cache.v_scales):
        assert scales is not None
        kept = scales[block, 0, row].clone()
        for softcap in (0.0, 5.0):
            scales[block, 0, row] = torch.nan
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            launch(batch, (batch.scale, 0, softcap, None), out)
            scales[block, 0, row] = kept
            assert out[0].isnan().all()
            close(out[1:], batch.reference(0, softcap)[1:])
