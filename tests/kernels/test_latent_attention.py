"""Latent attention on CPU against the float32 formulas: both forms, all kinds of pool, independence of the batch."""

from __future__ import annotations

import pytest
import torch

from coatcheck.kernels.attention.latent_attention import expanded_attention, expanded_attention_reference
from coatcheck.kernels.attention.merge_shards import merge_parts_of_ranks, pack_parts
from coatcheck.kernels.layers.heads_linear import HeadsLinear, heads_linear_reference
from coatcheck.kernels.layers.latent_rotary import rotate_and_store_latent, rotate_and_store_latent_reference
from coatcheck.kernels.layers.rms_norm import RmsNorm
from tests.examples import pairwise
from tests.kernels.attention_batch import LatentBatch, close
from tests.kernels.caches import QUANTISED, latent_cache
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("attention_bf16")]

MIXED = [(1, 1), (1, 15), (16, 16), (1, 257), (5, 130), (33, 40)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(4, 32, 16), (16, 512, 64), (5, 96, 48), (3, 40, 8)])
def test_absorbed_batches_agree_with_the_reference(dtype: torch.dtype, heads: int, rank: int, rope_dim: int) -> None:
    """Decodes, chunks and whole prompts in one batch give each sequence what the float32 formula gives."""
    batch = LatentBatch(MIXED, heads, rank, rope_dim, dtype)
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [torch.bfloat16, *QUANTISED])
@pytest.mark.parametrize("size", [16, 7])
def test_pools_of_any_kind_agree_with_the_reference(dtype: torch.dtype, kv: torch.dtype, size: int) -> None:
    """Quantised latents, with a scale for each latent and each rotary key, give what the formula gives for them."""
    batch = LatentBatch([(1, 1), (1, 257), (30, 100)], 8, 64, 32, dtype, size, kv)
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shards", [2, 8])
def test_parts_of_the_keys_merge(dtype: torch.dtype, kv: torch.dtype | None, shards: int) -> None:
    """Results over every n-th key and their logarithms merge to the result over all keys, also where a rank has no key
    of a query, and with more than one split of keys."""
    batch = LatentBatch([(1, 1), (1, 257), (30, 100), (2, 2100)], 8, 64, 32, dtype, 16, kv)
    close(batch.run_shards(shards), batch.reference())


def test_merged_bits_do_not_depend_on_the_batch() -> None:
    """A query beside other sequences has the bits that it has alone."""
    batch = LatentBatch([(3, 20), (1, 40)], 8, 64, 32, torch.bfloat16)
    whole = batch.run_shards(4)
    batch.q, batch.block_tables, batch.seq_lens = batch.q[3:], batch.block_tables[1:], batch.seq_lens[1:]
    batch.cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32)
    assert torch.equal(batch.run_shards(4), whole[3:])


def test_no_keys_at_all_give_zeros() -> None:
    """A padding row has logarithms of -inf on every rank, and its merged result is 0."""
    out, lse = torch.ones(2, 4, 8), torch.full((2, 4), -torch.inf)
    merged = merge_parts_of_ranks(torch.stack([pack_parts(out, lse, 2)[0]] * 2))
    assert merged.shape == (2, 2, 8) and not merged.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn])
def test_a_query_has_the_same_bits_in_a_decode_and_in_a_prefill(dtype: torch.dtype, kv: torch.dtype | None) -> None:
    """Queries of a long prefill beside other sequences equal decodes of one token, with more than one split of keys."""
    batch = LatentBatch([(40, 1100), (1, 33), (3, 20)], 6, 64, 16, dtype, 16, kv)
    whole = batch.run()
    for query in (0, 17, 39):
        assert torch.equal(whole[query], batch.one(0, query))
    assert torch.equal(whole[40], batch.one(1, 0))


@pairwise(
    ("dtype", DTYPES),
    ("nope, rope_dim, value", [(32, 16, 16), (128, 64, 128), (20, 6, 12)]),
    ("tokens, keys", [(1, 1), (50, 50), (40, 150)]),
)
def test_the_expanded_form_agrees_with_its_formula(
    dtype: torch.dtype, nope: int, rope_dim: int, value: int, tokens: int, keys: int
) -> None:
    """Keys and values of every head beside one rotary key for all heads, for whole prompts and for chunks."""
    random = torch.Generator().manual_seed(keys)
    q = torch.randn(tokens, 5, nope + rope_dim, generator=random).to(dtype)
    kv = torch.randn(keys, 5, nope + value, generator=random).to(dtype)
    rope_keys = torch.randn(keys, rope_dim, generator=random).to(dtype)
    have = expanded_attention(q, kv, rope_keys, nope, 0.1)
    close(have, expanded_attention_reference(q, kv, rope_keys, nope, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [None, torch.float16, *QUANTISED])
def test_latents_are_stored_as_the_reference_stores_them(dtype: torch.dtype, kv: torch.dtype | None) -> None:
    """Latents are normalised, rotary keys and queries rotated, in place too; slot -1 stays as it was."""
    random = torch.Generator().manual_seed(1)
    ours, theirs = (latent_cache(6, 8, 64, 32, kv or dtype, fill=0) for _ in range(2))
    wide = torch.randn(30, 200, generator=random).to(dtype)
    kv_rows, q = wide[:, 7:103], torch.randn(30, 3, 48, generator=random).to(dtype)
    angles = torch.rand(30, 16, generator=random) * 6
    cos, sin = (torch.cat((table, table), dim=1).to(dtype) for table in (angles.cos(), angles.sin()))
    slots = torch.randperm(48, generator=random)[:30]
    slots[[3, 11]] = -1
    norm = RmsNorm((torch.rand(64, generator=random) + 0.5).to(dtype), 1e-6)
    wanted = torch.empty(30, 3, 32, dtype=dtype)
    rotate_and_store_latent_reference(q[:, :, 16:], kv_rows, norm, cos, sin, theirs, slots, wanted)
    rotate_and_store_latent(q[:, :, 16:], kv_rows, norm, cos, sin, ours, slots, q[:, :, 16:])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(q[:, :, 16:], wanted, rtol=tolerance, atol=tolerance)
    every = torch.arange(6)
    step = {None: 0.0, torch.float16: 1e-3, torch.float8_e4m3fn: 0.13, torch.int8: 0.04, torch.uint8: 0.7}[kv]
    for have, want in zip(ours.rows(every), theirs.rows(every), strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=max(tolerance, step))
        assert torch.equal(have.abs().sum(1) == 0, want.abs().sum(1) == 0)  # slots that nobody wrote


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_linears_of_heads(dtype: torch.dtype, batch_invariant: bool) -> None:
    """Each head has its own weight; x may be shared by the heads, and heads may be computed some at a time."""
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(6, 40, 24, generator=random).to(dtype)
    linear = HeadsLinear(weight, batch_invariant=batch_invariant)
    x = torch.randn(70, 6, 30, generator=random).to(dtype)[:, :, 3:27]
    out = torch.zeros(70, 6, 50, dtype=dtype)
    linear(x, out[:, :, 5:45])
    close(out[:, :, 5:45], heads_linear_reference(weight, x))
    assert not out[:, :, :5].any() and not out[:, :, 45:].any()
    shared = x[:, :1].expand(-1, 2, -1)
    close(linear(shared, heads=slice(3, 5)), heads_linear_reference(weight[3:5], shared))
    if linear.form == "native" or batch_invariant:
        assert torch.equal(linear(x[5:9].contiguous()), linear(x)[5:9])
    assert linear(x[:0]).shape == (0, 6, 40)
