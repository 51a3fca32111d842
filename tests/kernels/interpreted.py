"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: each kernel's launcher on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatcheck.kernels.copy_blocks import launch_copy_blocks
from coatcheck.kernels.filter_floor import launch_filter_floor
from coatcheck.kernels.logprobs import launch_logprobs, logprobs_reference
from coatcheck.kernels.paged_decode import DecodeLaunch, launch_decode
from coatcheck.kernels.paged_prefill import PrefillLaunch, launch_prefill
from coatcheck.kernels.penalties import apply_penalties_reference, launch_penalties
from coatcheck.kernels.quantise import _fp8_bits, _nibbles, _widened
from coatcheck.kernels.rms_norm import launch_rms_norm, rms_norm_reference
from coatcheck.kernels.rotary import apply_rotary_reference, launch_rotary, rotary_and_store_reference
from coatcheck.kernels.sample import filter_reference, launch_draw, noise_bits_reference, sample_reference
from coatcheck.kernels.silu_mul import launch_silu_mul, silu_mul_reference
from coatcheck.kernels.store_kv import launch_store_kv, store_kv_reference
from coatcheck.kernels.token_mask import apply_token_mask_reference, launch_token_mask
from tests.kernels.caches import QUANTISED, pool_of, strided_cache
from tests.kernels.test_native_attention import Batch, close

SENTINEL = 7.0


def agree(have: Tensor, want: Tensor) -> None:
    tolerance = 2e-3 if have.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def attention() -> None:
    lengths = [(1, 1), (1, 15), (16, 16), (1, 17), (5, 257), (1, 600), (0, 0), (20, 33)]
    shapes = ((6, 2, 32, 0, 0.0, False), (4, 4, 16, 13, 5.0, True), (3, 1, 80, 20, 0.0, True))
    for dtype in (torch.float32, torch.float16):
        for heads, kv_heads, dim, window, softcap, with_sinks in shapes:
            batch = Batch(lengths, heads, kv_heads, dim, dtype)
            sinks = torch.randn(heads) if with_sinks else None
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            arguments = (batch.q, batch.cache, *batch.tables().values())
            launch_decode(*arguments, batch.scale, window, softcap, sinks, out)
            assert (out[2:18] == SENTINEL).all(), "the decode kernel wrote into a prefill's rows"
            decoded = out[:2].clone()
            launch_prefill(*arguments, 20, batch.scale, window, softcap, sinks, out)
            assert torch.equal(out[:2], decoded), "the prefill kernel wrote into a decode's rows"
            close(out, batch.reference(window, softcap, sinks))
            narrow = DecodeLaunch(16, 16, triton.next_power_of_2(dim), 4, 1)
            launch_decode(
                *arguments, batch.scale, window, softcap, sinks, out, programs=3, launch=narrow, split=64
            )  # fmt: skip
            wide = PrefillLaunch(64, 32, triton.next_power_of_2(dim), 4, 1)
            launch_prefill(*arguments, 20, batch.scale, window, softcap, sinks, out, launch=wide)
            close(out, batch.reference(window, softcap, sinks))


def one_order() -> None:
    """A query has the same bits alone, in a short chunk and in a whole prompt, with neighbours and without."""
    for dtype, pool in ((torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.int8)):
        whole = Batch([(45, 45), (3, 20)], 4, 2, 32, dtype, 16, pool)
        options = (whole.scale, 30, 5.0, torch.randn(4))
        want, have = torch.empty_like(whole.q), torch.empty_like(whole.q)
        launch_prefill(whole.q, whole.cache, *whole.tables().values(), 45, *options, want, True)
        tables = whole.block_tables[:1]
        for first, last in ((0, 1), (1, 2), (2, 20), (20, 44), (44, 45)):
            seq_lens = torch.tensor([last], dtype=torch.int32)
            cu_seqlens = torch.tensor([0, last - first], dtype=torch.int32)
            rows = (whole.q[first:last].contiguous(), whole.cache, tables, seq_lens, cu_seqlens)
            launch_prefill(*rows, last - first, *options, have[first:last], True)
        assert torch.equal(have[:45], want[:45])
        close(want, whole.reference(*options[1:]))


DIMS = (64, 80, 96, 128, 256)
POOLS = (torch.float32, torch.float16, *QUANTISED)
HEADS = ((2, 2), (4, 2), (3, 1))  # MHA, GQA, MQA
OPTIONS = ((0, 0.0, False), (13, 0.0, False), (0, 5.0, False), (0, 0.0, True), (20, 5.0, True))  # window, cap, sinks


def matrix(whole: bool = False) -> None:
    """Every head size over every pool, the other features in turn so that each meets each; `whole`: all of them."""
    for d, dim in enumerate(DIMS):
        for p, pool in enumerate(POOLS):
            for h, heads in enumerate(HEADS):
                for o, options in enumerate(OPTIONS):
                    if whole or (h == (d + p) % len(HEADS) and o == (d + 2 * p) % len(OPTIONS)):
                        cell(dim, pool, *heads, *options, size=(8, 16, 32)[(d + p + o) % 3])


def cell(
    dim: int, pool: torch.dtype, heads: int, kv_heads: int, window: int, softcap: float, with_sinks: bool, size: int
) -> None:
    """Both kernels in one batch: a last block that is full, one of a single token, prefixes shared, rows to spare."""
    dtype = torch.float16 if pool == torch.float16 else torch.float32
    batch = Batch([(1, 2 * size + 1), (18, 33), (1, size), (0, 0)], heads, kv_heads, dim, dtype, size, pool)
    batch.block_tables[2] = batch.block_tables[0]
    sinks = torch.randn(heads) if with_sinks else None
    out = torch.full((len(batch.q) + 2, heads, dim), SENTINEL).to(dtype)
    q = torch.cat((batch.q, batch.q[:2]))
    arguments = (q, batch.cache, *batch.tables().values())
    launch_decode(*arguments, batch.scale, window, softcap, sinks, out)
    assert (out[1:19] == SENTINEL).all(), "the decode kernel wrote into a prefill's rows"
    launch_prefill(*arguments, 18, batch.scale, window, softcap, sinks, out)
    assert (out[len(batch.q) :] == SENTINEL).all(), "a row past the last sequence was written"
    close(out[: len(batch.q)], batch.reference(window, softcap, sinks))


def long() -> None:
    """Nine splits and one key, and the first chunk that sees past a split; an empty batch launches nothing."""
    batch = Batch([(1, 4097), (2, 513)], 2, 1, 64, torch.float32)
    out = torch.full(batch.q.shape, SENTINEL)
    arguments = (batch.q, batch.cache, *batch.tables().values())
    launch_decode(*arguments, batch.scale, 0, 0.0, None, out)
    launch_prefill(*arguments, 2, batch.scale, 0, 0.0, None, out)
    close(out, batch.reference())
    counted = torch.full(batch.q.shape, SENTINEL)
    launch_prefill(*arguments, 2, batch.scale, 0, 0.0, None, counted, num_prefills=1)
    assert torch.equal(counted[1:], out[1:]), "programs for one prompt among decodes were too few"
    launch_decode(*arguments, batch.scale, 600, 0.0, None, out)  # splits in which everything is masked
    close(out[:1], batch.reference(600)[:1])
    empty = Batch([], 2, 1, 64, torch.float32)
    launch_decode(empty.q, empty.cache, *empty.tables().values(), 1.0, 0, 0.0, None, empty.q)
    launch_prefill(empty.q, empty.cache, *empty.tables().values(), 1, 1.0, 0, 0.0, None, empty.q)


@triton.jit
def _widen_all(x, y, KIND: tl.constexpr, CONVERT: tl.constexpr, HALF: tl.constexpr):
    i = tl.arange(0, 256)
    dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    if KIND == 3:
        low, high = _nibbles(tl.load(x + i), CONVERT, dtype, True)
        tl.store(y + i, low.to(tl.float32) + 16 * high.to(tl.float32))
    else:
        tl.store(y + i, _widened(tl.load(x + i), KIND, CONVERT, dtype, True).to(tl.float32))


@triton.jit
def _narrow_all(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _fp8_bits(tl.load(x + i)).to(tl.uint8))


def elements() -> None:
    """Every byte means what torch says, however e4m3 is read; and so is every tie between two e4m3 rounded."""
    every = torch.arange(256, dtype=torch.uint8)
    fp8 = every.view(torch.float8_e4m3fn).float()
    number = ~fp8.isnan()
    for kind, convert, want in (
        (1, 1, fp8),
        (1, 0, fp8),
        (2, 0, every.view(torch.int8).float()),
        (3, 0, every.float() - 8 - 16 * 8),
    ):
        for half in (False, True):
            have = torch.full((256,), SENTINEL)
            _widen_all[(1,)](every, have, KIND=kind, CONVERT=convert, HALF=half)
            assert torch.equal(have[number | (kind != 1)], want[number | (kind != 1)]), (kind, convert, half)
    exact = fp8[number].sort().values
    x = torch.cat((exact, (exact[1:] + exact[:-1]) / 2, torch.randn(500) * torch.logspace(-4, 2, 500)))
    x = torch.cat((x, torch.zeros(1024 - len(x)))).clamp(-448, 448)
    bits = torch.zeros(1024, dtype=torch.uint8)
    _narrow_all[(1,)](x, bits, BLOCK=1024)
    assert torch.equal(bits.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())


def quantised() -> None:
    """Pools of every other kind: decode, prefill, store, and rotary with store; e4m3 taken apart here or not."""
    lengths = [(1, 1), (1, 17), (9, 33), (1, 530)]
    for kv in (*QUANTISED, torch.float16):
        for dtype, (heads, kv_heads, dim, window, softcap) in (
            (torch.float32, (6, 2, 32, 0, 0.0)),
            (torch.float16, (3, 1, 80, 20, 5.0)),
        ):
            batch = Batch(lengths, heads, kv_heads, dim, dtype, kv=kv)
            out = torch.full(batch.q.shape, SENTINEL).to(dtype)
            arguments = (batch.q, batch.cache, *batch.tables().values())
            launch_decode(*arguments, batch.scale, window, softcap, None, out)
            launch_prefill(*arguments, 9, batch.scale, window, softcap, None, out)
            close(out, batch.reference(window, softcap))
            quantised_store(dtype, kv)


def quantised_store(dtype: torch.dtype, kv: torch.dtype) -> None:
    """Scales are the reference's, elements at most one step off: a compiler may fuse what the reference rounds."""
    x = torch.randn(6, 3 * 24).to(dtype) * torch.tensor([1, 1, 1, 1e3, 0, 1e-6])[:, None].to(dtype)
    q, k, v = (part.unflatten(1, (1, 24)) for part in x.split(24, dim=1))
    angle = torch.randn(6, 8).repeat(1, 2)
    slots = torch.tensor([4, -1, 0, 11, 3, 7])
    for turned in (False, True):
        have, want = (strided_cache(4, 1, 3, 24, kv) for _ in range(2))
        if turned:
            launch_rotary(q, k, v, angle.cos(), angle.sin(), torch.empty_like(q), None, have, slots)
            rotary_and_store_reference(q, k, v, angle.cos(), angle.sin(), want, slots)
        else:
            launch_store_kv(k, v, have, slots)
            store_kv_reference(k, v, want, slots)
        ours, theirs = pool_of(have), pool_of(want)
        changed = ours != theirs
        if kv == torch.float8_e4m3fn:  # Triton 3.6's interpreter negates 0 to 0
            changed &= (ours | theirs) & 0x7F != 0
        assert changed.sum() <= 3, f"{changed.sum()} bytes differ"
        blocks = torch.arange(4)
        for ours, theirs in zip(have.rows_reference(blocks), want.rows_reference(blocks), strict=True):
            largest = theirs.nan_to_num().abs().amax(-1, keepdim=True)
            assert ((ours - theirs).nan_to_num().abs() <= 0.16 * largest).all()


def rows() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        x, residual, weight = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
        for offset, cast_first in ((0.0, True), (1.0, False)):
            out, total = torch.full_like(x, SENTINEL), torch.full_like(x, SENTINEL)
            launch_rms_norm(x, weight, 1e-6, residual, offset, cast_first, out, total)
            want = rms_norm_reference(x, weight, 1e-6, residual, offset, cast_first)
            agree(out, want[0])
            agree(total, want[1])
        for activation in ("silu", "gelu_tanh"):
            gate_up = torch.randn(3, 70).to(dtype)[:, :66] * 20
            out = torch.full((3, 33), SENTINEL).to(dtype)
            launch_silu_mul(gate_up, activation, out)
            agree(out, silu_mul_reference(gate_up, activation))
        rotary(dtype)
    pool = torch.randint(0, 255, (6, 4104), dtype=torch.uint8)
    want = pool.clone()
    want[[0, 5]] = want[[2, 2]]
    launch_copy_blocks(pool, pool, torch.tensor([2, 2]), torch.tensor([0, 5]), 2)
    assert torch.equal(pool, want)
    for width in (4104, 4099):  # eight bytes at a time, and one
        wide, blocks = pool[:, :width], torch.tensor([5, 1, 3])
        rows_ = torch.zeros(3, width + 5, dtype=torch.uint8)[:, :width]
        launch_copy_blocks(wide, rows_, blocks, None, 3)
        assert torch.equal(rows_, wide[blocks])
        launch_copy_blocks(255 - rows_, pool[:, :width], None, blocks, 3)
        want[blocks, :width] = 255 - want[blocks, :width]
        assert torch.equal(pool, want)


def empty() -> None:
    """Steps without a row launch nothing, and nothing is written."""
    none, slots, ids = torch.zeros(0, 24), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int32)
    weight, heads = torch.randn(24), torch.zeros(0, 1, 24)
    launch_rms_norm(none, weight, 1e-6, none, 0.0, True, none.clone(), none.clone())
    launch_silu_mul(none, "silu", none[:, :12].contiguous())
    for kv in (torch.float32, torch.int8):
        cache = strided_cache(2, 1, 3, 24, kv)
        before = pool_of(cache).clone()
        launch_store_kv(heads, heads, cache, slots)
        launch_rotary(heads, heads, heads, none, none, heads.clone(), None, cache, slots)
        assert torch.equal(pool_of(cache), before)
    launch_copy_blocks(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8), slots, slots, 0)
    floats, ints = torch.zeros(0), torch.zeros(0, dtype=torch.int32)
    launch_filter_floor(none, floats, ints, floats, floats, floats.clone())
    launch_draw(none, floats, floats, slots, ints, slots, slots.clone())
    launch_token_mask(torch.zeros(2, 24), slots, torch.zeros(0, 1, dtype=torch.int32))
    launch_penalties(none, ids, ints, ints, floats, floats, floats)
    assert [len(part) for part in launch_logprobs(none, slots)] == [0, 0, 0]


def rotary(dtype: torch.dtype) -> None:
    """Also the plain store: slot -1 is skipped by both, and no other slot is touched."""
    fused = torch.randn(4, 5 * 24).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 24)) for part in fused.split([72, 24, 24], dim=1))
    angle = torch.randn(4, 8).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    want_q, want_k = apply_rotary_reference(q, k, cos, sin)
    q_out, k_out = torch.empty_like(want_q), torch.empty_like(want_k)
    launch_rotary(q, k, None, cos, sin, q_out, k_out, None, None)
    agree(q_out, want_q)
    agree(k_out, want_k)
    slots = torch.tensor([4, -1, 0, 11])
    for turned in (False, True):
        have, want = (strided_cache(4, 1, 3, 24, dtype) for _ in range(2))
        if turned:
            launch_rotary(q, k, v, cos, sin, q_out, None, have, slots)
        else:
            launch_store_kv(k, v, have, slots)
        store_kv_reference(k_out if turned else k, v, want, slots)
        assert torch.equal(pool_of(have), pool_of(want))


def sampling() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 3000) * 2
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.5])
    top_k, top_p = torch.tensor([0, 0, 20, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.9, 0.8])
    min_p, choice = torch.zeros(4), torch.tensor([0, 1, -1, 2**31 - 1], dtype=torch.int32)
    seed, position = torch.tensor([0, -1, 2**63 - 1, 12345]), torch.tensor([0, 2**40, 5, 131071])
    floors = torch.empty(4)
    launch_filter_floor(logits, temperature, top_k, top_p, min_p, floors)
    out, bits = torch.empty(4, dtype=torch.int64), torch.empty(4, 3000, dtype=torch.int64)
    launch_draw(logits, temperature, floors, seed, choice, position, out, bits)
    assert torch.equal(bits, noise_bits_reference(seed, choice, position, torch.arange(3000)))
    assert torch.equal(out, sample_reference(logits, temperature, top_k, top_p, min_p, seed, choice, position))
    for vocab in (2999, 33, 1024):
        have, rows = torch.randn(4, 3000)[:, :vocab], torch.tensor([3, 0])
        mask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32)
        want = apply_token_mask_reference(have.clone(), rows, mask)
        launch_token_mask(have, rows, mask)
        assert torch.equal(have, want) and want.isinf().any()


def probabilities() -> None:
    """Log-probabilities and ranks of rows of any length, forbidden tokens and ties among them."""
    torch.manual_seed(5)
    for vocab in (1, 33, 5000):
        logits = (torch.randn(4, vocab + 2) * 4)[:, :vocab]
        logits[1] = logits[1].round()
        logits[2, vocab // 2 + 1 :] = -torch.inf
        tokens = torch.tensor([0, vocab - 1, 0, vocab // 2])
        _, chosen, rank = launch_logprobs(logits, tokens)
        want = logprobs_reference(logits, tokens, 0)
        agree(chosen, want[0])
        assert torch.equal(rank, want[1])


def filters() -> None:
    """Floors keep exactly the reference's set: ties, forbidden tokens, strides, and every filter alone and together."""
    torch.manual_seed(2)
    for vocab in (1, 5, 5000):
        logits = (torch.randn(12, vocab + 3) * 3)[:, :vocab]
        logits[:6] = logits[:6].round()  # ties
        if vocab > 1:
            logits[3, vocab // 2 :] = -torch.inf
        temperature = torch.tensor([1.0, 0.5, 2.0, 1.0] * 3)
        top_k = torch.tensor([0, 7, 0, 1, 50, 3, 0, 2, 5000, 0, 0, 1], dtype=torch.int32)
        top_p = torch.tensor([0.9, 1.0, 0.3, 0.95, 0.7, 1.0, 1.0, 0.5, 0.9, 0.01, 1.0, 1.0])
        min_p = torch.tensor([0.0, 0.01, 0.1, 0.0, 0.0, 0.3, 0.05, 0.0, 0.02, 0.0, 0.0, 1.0])
        floors = torch.full((12,), SENTINEL)
        launch_filter_floor(logits, temperature, top_k, top_p, min_p, floors)
        scaled = logits / temperature[:, None]
        want = filter_reference(scaled, top_k, top_p, min_p) > float("-inf")
        have = (scaled >= floors[:, None]) & (scaled > float("-inf"))
        assert torch.equal(have, want), (vocab, (have != want).sum(dim=1))


def penalties() -> None:
    torch.manual_seed(3)
    logits, tokens = torch.randn(5, 43)[:, :40], torch.randint(0, 40, (5, 1200), dtype=torch.int32)
    total = torch.tensor([1200, 5, 0, 1, 1100], dtype=torch.int32)
    prompt = torch.tensor([4, 5, 0, 0, 1050], dtype=torch.int32)
    for row in range(5):
        tokens[row, total[row] :] = 10**6  # padding may hold anything
    values = (torch.tensor([1.3, 2.0, 1.5, 0.7, 1.0]), torch.tensor([0.5, 0.1, 1, -1, 0.2]), torch.rand(5))
    want = apply_penalties_reference(logits.clone(), tokens, prompt, total, *values)
    launch_penalties(logits, tokens, prompt, total, *values)
    agree(logits, want)


GROUPS: dict[str, Callable[[], None]] = {
    "attention": attention,
    "matrix": matrix,
    "whole matrix": partial(matrix, whole=True),
    "long": long,
    "order": one_order,
    "elements": elements,
    "quantised": quantised,
    "rows": rows,
    "empty": empty,
    "sampling": sampling,
    "filters": filters,
    "probabilities": probabilities,
    "penalties": penalties,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        GROUPS[name]()
    print("agreed")
