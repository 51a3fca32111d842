"""Paged attention on CPU against the float32 reference: lengths, layouts, options, and independence of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coatcheck.kernels.attention.paged_attention import paged_attention
from coatcheck.kernels.kv.quantise import widen_reference
from coatcheck.kernels.launch_check import LaunchRefused
from tests.examples import pairwise
from tests.kernels.attention_batch import Batch, close
from tests.kernels.caches import QUANTISED
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("attention_bf16")]

OTHER_SHAPES = [(4, 4, 16), (4, 2, 96), (7, 1, 128)]  # heads, KV heads, head size
MIXED = [(1, 1), (1, 15), (16, 16), (1, 17), (5, 257), (1, 257), (33, 40), (130, 200)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 4, 16), (6, 2, 32), (12, 4, 64), (8, 1, 80), (4, 2, 96), (7, 1, 128), (2, 1, 256)],
)
def test_mixed_batches_agree_with_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    """Decodes, chunks and whole prompts in one batch give each sequence what the float32 formula gives."""
    batch = Batch(MIXED, heads, kv_heads, dim, dtype)
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float16, *QUANTISED])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(12, 4, 64), (8, 1, 80), *(pytest.param(*shape, marks=pytest.mark.full) for shape in OTHER_SHAPES)],
)
def test_pools_of_any_kind_agree_with_the_reference(
    dtype: torch.dtype, kv: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Pools of quantised elements or other floats give what the formula gives, for queries of any dtype."""
    batch = Batch([(1, 1), (16, 16), (1, 257), (33, 40), (30, 100)], heads, kv_heads, dim, dtype, kv=kv)
    sinks = torch.randn(heads)
    close(batch.run(sliding_window=70, softcap=4.0, sinks=sinks), batch.reference(70, 4.0, sinks))
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("size", [7, 16])
def test_every_code_of_a_value_is_exact(kv: torch.dtype, heads: int, size: int) -> None:
    """A query of zeros over one key gives the key's value, bit for bit. Two values have all codes but FP8's NaN."""
    batch = Batch([(1, 1), (1, 1)], heads, 1, 256, torch.float32, size, kv)
    batch.q.zero_()
    width = batch.cache.v_bytes.shape[-1]
    codes = torch.arange(2 * width, dtype=torch.int32) % 256
    if kv == torch.float8_e4m3fn:
        codes[codes % 128 == 127] = 0
    rows = batch.block_tables[:, 0].long()
    batch.cache.v_bytes[rows, 0, 0] = codes.to(torch.uint8).view(batch.cache.v_bytes.dtype).view(2, width)
    assert batch.cache.v_scales is not None
    batch.cache.v_scales[rows] = 0.5
    values = widen_reference(batch.cache.v_bytes[rows, 0, 0].view(kv), batch.cache.v_scales[rows, 0, 0])
    assert torch.equal(batch.run(), values[:, None].expand(-1, heads, -1))


@pytest.mark.parametrize("heads", [3, 16])
def test_subnormal_fp8_keys_and_values_count(heads: int) -> None:
    """Elements that are subnormal numbers of float8, times large scales, give what the formula gives."""
    batch = Batch([(1, 300), (20, 90)], heads, 1, 64, torch.float32, kv=torch.float8_e4m3fn)
    for codes, scales in ((batch.cache.k_bytes, batch.cache.k_scales), (batch.cache.v_bytes, batch.cache.v_scales)):
        assert scales is not None
        codes.copy_(torch.randint(8, codes.shape) + 128 * torch.randint(2, codes.shape))
        scales.fill_(100.0)
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("kv", QUANTISED)
def test_results_over_a_quantised_pool_do_not_depend_on_the_batch(kv: torch.dtype) -> None:
    """A sequence has the same bits alone and in a batch, also if the block size is not a power of two."""
    batch = Batch([(30, 130), (1, 40), (50, 1100)], 6, 2, 64, torch.bfloat16, 7, kv)
    alone = paged_attention(
        batch.q[:30], batch.cache, block_tables=batch.block_tables[:1], seq_lens=batch.seq_lens[:1],
        cu_seqlens_q=batch.cu_seqlens_q[:2], scale=batch.scale,
    )  # fmt: skip
    assert torch.equal(batch.run()[:30], alone)
    close(batch.run(), batch.reference())


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("window", [0, 1, 13, 64, 100]),
    ("softcap", [0.0, 5.0]),
    ("with_sinks", [False, True]),
)
def test_window_softcap_and_sinks(dtype: torch.dtype, window: int, softcap: float, with_sinks: bool) -> None:
    """Sliding window, soft-cap and sinks give what the formula gives, alone and together."""
    batch = Batch([(1, 90), (70, 190), (3, 3), (1, 1)], 6, 2, 64, dtype)
    sinks = torch.randn(6) if with_sinks else None
    have = batch.run(sliding_window=window, softcap=softcap, sinks=sinks)
    close(have, batch.reference(window, softcap, sinks))


@pytest.mark.parametrize("size", [1, 7, 32, 128])
def test_any_block_size(size: int) -> None:
    """Block sizes other than 16 give the same results, also sizes that are not powers of two."""
    batch = Batch([(1, 100), (20, 65), (1, 129)], 4, 2, 32, torch.bfloat16, size)
    close(batch.run(), batch.reference())


def test_a_head_size_that_the_c_library_lacks_takes_the_reference() -> None:
    """A head_dim that is no multiple of 16 gives what the formula gives."""
    batch = Batch([(2, 9), (1, 17)], 2, 1, 20, torch.bfloat16)
    close(batch.run(), batch.reference())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_sequence_is_summed_in_splits(dtype: torch.dtype) -> None:
    """Sequences longer than one split of 1,024 keys give what the formula gives, in decode and prefill."""
    batch = Batch([(1, 2500), (3, 1030), (1, 1024), (1, 1025)], 3, 1, 64, dtype)
    close(batch.run(), batch.reference())
    close(batch.run(sliding_window=1200), batch.reference(1200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_batch_and_chunks(dtype: torch.dtype) -> None:
    """A sequence has the same bits alone, in a batch, in one chunk, in several, and token by token."""
    batch = Batch([(300, 1300), (1, 40), (50, 1100)], 6, 2, 64, dtype)
    whole = batch.run()
    alone = paged_attention(
        batch.q[:300], batch.cache, block_tables=batch.block_tables[:1], seq_lens=batch.seq_lens[:1],
        cu_seqlens_q=batch.cu_seqlens_q[:2], scale=batch.scale,
    )  # fmt: skip
    assert torch.equal(whole[:300], alone)
    for first, last in ((0, 100), (100, 101), (101, 260), (299, 300)):
        part = paged_attention(
            batch.q[first:last], batch.cache, block_tables=batch.block_tables[:1],
            seq_lens=torch.tensor([1000 + last], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
            scale=batch.scale,
        )  # fmt: skip
        assert torch.equal(whole[first:last], part)


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("heads", [1, 2, 3, 4, 6, 7]),
    ("dim", [32, 64, 128]),
    ("window", [0, 20]),
    ("softcap", [0.0, 5.0, 30.0]),
    ("kv", [None, torch.float8_e4m3fn, torch.int8, torch.uint8]),
)
def test_a_decode_has_the_bits_of_a_prefill(
    dtype: torch.dtype, heads: int, dim: int, window: int, softcap: float, kv: torch.dtype | None
) -> None:
    """Each query of a prefill has the bits that a decode at its position gives, with window and soft-cap too."""
    batch = Batch([(130, 130)], 2 * heads, 2, dim, dtype, kv=kv)
    options: dict[str, Any] = {"scale": batch.scale, "sliding_window": window, "softcap": softcap}
    prefill = batch.run(**options)
    for query in (0, 1, 15, 40, 63, 64, 100, 129):
        decode = paged_attention(
            batch.q[query : query + 1], batch.cache, block_tables=batch.block_tables,
            seq_lens=torch.tensor([query + 1], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), **options,
        )  # fmt: skip
        assert torch.equal(prefill[query], decode[0])


def test_shared_blocks_give_both_sequences_their_prefix() -> None:
    """Two sequences with the same blocks in their tables get the same result."""
    batch = Batch([(1, 40), (1, 40)], 4, 2, 64, torch.bfloat16)
    batch.block_tables[1] = batch.block_tables[0]
    batch.q[1] = batch.q[0]
    have = batch.run()
    assert torch.equal(have[0], have[1])


def test_padding_changes_no_result() -> None:
    """Rows past the last sequence and sequences without tokens change no result. An empty batch gives no rows."""
    batch = Batch([(1, 20), (0, 0), (3, 30)], 4, 2, 32, torch.bfloat16)
    padded = torch.cat((batch.q, batch.q))
    out = paged_attention(padded, batch.cache, **batch.tables(), scale=batch.scale)
    assert torch.equal(out[:4], batch.run())
    empty = Batch([], 4, 2, 32, torch.bfloat16)
    assert empty.run().shape == (0, 4, 32)


def test_a_refusal_names_the_argument() -> None:
    """Wrong shapes, dtypes, strides, devices and options are refused, and the message names the argument."""
    batch = Batch([(2, 20), (1, 3)], 4, 2, 32, torch.float32)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("q", {"q": batch.q[:, :3]}),
        ("q", {"q": batch.q.transpose(1, 2)}),
        ("q", {"q": batch.q.double()}),
        ("block_tables", {"block_tables": batch.block_tables.long()}),
        ("seq_lens", {"seq_lens": batch.seq_lens[:1]}),
        ("cu_seqlens_q", {"cu_seqlens_q": batch.cu_seqlens_q[:2]}),
        ("cu_seqlens_q", {"cu_seqlens_q": batch.cu_seqlens_q.to("meta")}),
        ("sinks", {"sinks": torch.zeros(3)}),
        ("sliding_window", {"sliding_window": -1}),
        ("softcap", {"softcap": float("nan")}),
    ]
    good = dict(q=batch.q, cache=batch.cache, scale=1.0, **batch.tables())
    for name, change in cases:
        arguments = {**good, **change}
        with pytest.raises(LaunchRefused, match=f"^{name}: expected "):
            paged_attention(arguments.pop("q"), arguments.pop("cache"), **arguments)
