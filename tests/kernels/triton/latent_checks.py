"""Latent attention, over pools of every kind; run by kernel_checks.py and tests/gpu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.attention.latent_tiles import launch_latent_attention, pick_latent_tiles
from coatcheck.kernels.attention.paged_tiles import make_plan
from coatcheck.kernels.attention.tile_launch import Tiles
from coatcheck.kernels.gpu_properties import gpu_properties
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.kernels.layers.latent_rotary import rotate_and_store_latent, rotate_and_store_latent_reference
from coatcheck.kernels.layers.rms_norm import RmsNorm
from tests.kernels.attention_batch import LatentBatch
from tests.kernels.caches import QUANTISED, latent_cache
from tests.kernels.triton.agreement import SENTINEL

_LENGTHS = [(1, 1), (1, 17), (9, 9), (1, 290), (5, 130)]
# Heads, rank, rope_dim: powers of two, and sizes that blocks exceed.
_SHAPES = ((16, 64, 16), (5, 48, 12))


def latents(dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16)) -> None:
    """Decodes and chunks of one batch over every pool; over pools of floats with 3 programs too."""
    for dtype in dtypes:
        pools = (None, *QUANTISED) if dtype == dtypes[0] else (None,)
        for index, pool in enumerate(pools):
            heads, rank, rope = _SHAPES[index % 2]
            batch = LatentBatch(_LENGTHS, heads, rank, rope, dtype, (16, 8)[index % 2], pool)
            want = batch.reference()
            for programs in (None, 3) if pool is None else (None,):
                have = torch.full((*batch.q.shape[:2], rank), SENTINEL, dtype=dtype)
                _launch(batch, have, programs)
                # Quantised rows are rounded to the dtype before they are multiplied.
                tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
                torch.testing.assert_close(have.float(), want, rtol=tolerance, atol=tolerance)
        stored(dtype)
        shards(dtype)
    for pool in QUANTISED:
        broken(dtypes[0], pool)
    same_bits(dtypes[0])


def broken(dtype: torch.dtype, pool: torch.dtype) -> None:
    """A latent or a rotary key that is NaN makes its sequence NaN."""
    batch = LatentBatch([(1, 17), (1, 33)], 4, 64, 16, dtype, 16, pool)
    want = batch.reference()
    block = int(batch.block_tables[0, 0])
    for scales in (batch.cache.latent_scales, batch.cache.rope_scales):
        assert scales is not None
        kept = scales[block, 0, 3].clone()
        scales[block, 0, 3] = torch.nan
        have = torch.full((*batch.q.shape[:2], 64), SENTINEL, dtype=dtype)
        _launch(batch, have, None)
        scales[block, 0, 3] = kept
        assert have[0].isnan().all()
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(have[1:].float(), want[1:], rtol=tolerance, atol=tolerance)


def shards(dtype: torch.dtype) -> None:
    """Ranks that store every n-th token each give parts that merge to the whole, with keys that are divided among
    programs and not, and with fewer keys than ranks."""
    for count, pool in ((2, None), (8, torch.int8)):
        batch = LatentBatch(_LENGTHS, 16, 64, 16, dtype, 16, pool)
        for programs, batch_invariant in ((None, False), (1, False), (None, True)):

            def attend(q: Tensor, cache: LatentCache, *, lse: Tensor, scale: float, **tables: Tensor) -> Tensor:
                lens = tables["seq_lens"].tolist()
                tiles = _tiles(batch, programs, batch_invariant=batch_invariant)  # noqa: B023
                plan = make_plan([1] * len(lens), lens, tiles, 0, q.device)
                out = q.new_full((len(q), 16, 64), SENTINEL)
                launch_latent_attention(q, cache, tables["block_tables"], plan, scale, out, lse)
                return out

            tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            have = batch.run_shards(count, attend).float()
            torch.testing.assert_close(have, batch.reference(), rtol=tolerance, atol=tolerance)


def _tiles(batch: LatentBatch, programs: int | None, *, batch_invariant: bool) -> Tiles:
    tiles = pick_latent_tiles(
        batch.q.shape[1], batch.cache.rank, element_size=batch.q.element_size(), pool_bits=batch.cache.bits,
        gpu=gpu_properties(batch.q.device), batch_invariant=batch_invariant,
    )  # fmt: skip
    if programs is None:
        return tiles
    limited = [tile._replace(shape=tile.shape._replace(programs=programs)) for tile in tiles[:3]]
    return Tiles(limited[0], limited[1], limited[2], batch_invariant)


def _launch(batch: LatentBatch, out: torch.Tensor, programs: int | None, *, batch_invariant: bool = False) -> int:
    """Returns the number of slots."""
    tiles = _tiles(batch, programs, batch_invariant=batch_invariant)
    plan = make_plan(batch.cu_seqlens_q.diff().tolist(), batch.seq_lens.tolist(), tiles, 0, batch.q.device)
    launch_latent_attention(batch.q, batch.cache, batch.block_tables, plan, batch.scale, out)
    return plan.space.slots


def same_bits(dtype: torch.dtype) -> None:
    """In batch-invariant mode a query has the same bits in a chunk beside others and alone, with its keys divided among
    programs and by one program."""
    batch = LatentBatch([(3, 1100), (1, 20)], 4, 32, 16, dtype, 16, torch.int8)
    one, many = (torch.empty((*batch.q.shape[:2], 32), dtype=dtype) for _ in range(2))
    assert _launch(batch, one, 1, batch_invariant=True) == 0
    assert _launch(batch, many, None, batch_invariant=True) > 0, "no keys were divided: this proves nothing"
    assert torch.equal(one, many)
    alone = torch.empty((1, 4, 32), dtype=dtype)
    tiles = _tiles(batch, None, batch_invariant=True)
    plan = make_plan([1], [1099], tiles, 0, batch.q.device)
    launch_latent_attention(batch.q[1:2].contiguous(), batch.cache, batch.block_tables[:1], plan, batch.scale, alone)
    assert torch.equal(alone[0], one[1])


def stored(dtype: torch.dtype) -> None:
    """Latents are normalised, rotary keys and queries rotated, in place; slot -1 and other slots stay as they were."""
    random = torch.Generator(torch.get_default_device()).manual_seed(1)
    for pool in (dtype, *QUANTISED):
        ours, theirs = (latent_cache(4, 8, 48, 12, pool, fill=0) for _ in range(2))
        kv = torch.randn(9, 70, generator=random).to(dtype)[:, 5:65]
        q = torch.randn(9, 10, 40, generator=random).to(dtype)
        angles = torch.rand(9, 6, generator=random) * 6
        cos, sin = (torch.cat((table, table), dim=1).to(dtype) for table in (angles.cos(), angles.sin()))
        slots = torch.randperm(32, generator=random)[:9]
        slots[3] = -1
        norm = RmsNorm((torch.rand(48, generator=random) + 0.5).to(dtype), 1e-6)
        wanted = torch.empty(9, 10, 12, dtype=dtype)
        before = q[:, :, :28].clone()
        rotate_and_store_latent_reference(q[:, :, 28:], kv, norm, cos, sin, theirs, slots, wanted)
        rotate_and_store_latent(q[:, :, 28:], kv, norm, cos, sin, ours, slots, q[:, :, 28:])
        step = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(q[:, :, 28:], wanted, rtol=step, atol=step)
        assert torch.equal(q[:, :, :28], before)
        error = {torch.float8_e4m3fn: 0.13, torch.int8: 0.04, torch.uint8: 0.7}.get(pool, step)
        for have, want in zip(ours.rows(torch.arange(4)), theirs.rows(torch.arange(4)), strict=True):
            torch.testing.assert_close(have, want, rtol=step, atol=error)
            assert torch.equal(have.abs().sum(1) == 0, want.abs().sum(1) == 0)  # slots that nobody wrote
