"""Norm, rotary, activation, copies and stores; run by kernel_checks.py and tests/gpu."""

import torch
import triton
import triton.language as tl

from coatcheck.kernels.attention.page_indices import gather_pages
from coatcheck.kernels.attention.rotary import rotary_and_store, rotary_and_store_reference
from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import _fp8_bits, _nibbles, _widened
from coatcheck.kernels.kv.store_kv import store_kv, store_kv_reference
from coatcheck.kernels.kv.transfer_blocks import sum_blocks, transfer_blocks_reference
from coatcheck.kernels.layers.rms_norm import RmsNorm, norm_rotate_and_store, rms_norm_reference
from coatcheck.kernels.layers.silu_mul import silu_mul, silu_mul_reference
from coatcheck.kernels.sampling.draw_part import draw_part
from coatcheck.kernels.sampling.filter_floor import filter_floor
from coatcheck.kernels.sampling.logprobs import launch_logprobs
from coatcheck.kernels.sampling.penalties import apply_penalties
from coatcheck.kernels.sampling.sample import launch_draw
from coatcheck.kernels.sampling.token_mask import apply_token_mask
from tests.kernels.caches import QUANTISED, pool_of, strided_cache
from tests.kernels.triton.agreement import SENTINEL, agree


@triton.jit  # type: ignore[untyped-decorator]
def _widen_all(x, y, KIND: tl.constexpr, CONVERT: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 256)
    dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    if KIND == 3:
        low, high = _nibbles(tl.load(x + i), CONVERT, dtype, True)
        tl.store(y + i, low.to(tl.float32) + 16 * high.to(tl.float32))
    else:
        tl.store(y + i, _widened(tl.load(x + i), KIND, CONVERT, dtype, True).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _narrow_all(x, y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(y + i, _fp8_bits(tl.load(x + i)).to(tl.uint8))


def elements() -> None:
    """Every byte is widened as by torch, with each way to read e4m3. Ties between two e4m3 are rounded as by torch."""
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


def stores(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> None:
    """The store, and rotary with the store, into pools of every other dtype than the activations'."""
    for kv in (*QUANTISED, torch.float16):
        for dtype in dtypes:
            store(dtype, kv)
            if kv in QUANTISED:
                broken(dtype, kv)
            for offset in (0.0, 1.0):
                normed(dtype, kv, offset)


def store(dtype: torch.dtype, kv: torch.dtype) -> None:
    """Scales are the reference's, elements at most one step off: a compiler may fuse what the reference rounds."""
    x = torch.randn(6, 3 * 24).to(dtype) * torch.tensor([1, 1, 1, 1e3, 0, 1e-6])[:, None].to(dtype)
    q, k, v = (part.unflatten(1, (1, 24)) for part in x.split(24, dim=1))
    angle = torch.randn(6, 8).repeat(1, 2)
    slots = torch.tensor([4, -1, 0, 11, 3, 7])
    for with_rotary in (False, True):
        have, want = (strided_cache(4, 1, 3, 24, kv) for _ in range(2))
        if with_rotary:
            rotary_and_store(q, k, v, angle.cos(), angle.sin(), have, slots)
            rotary_and_store_reference(q, k, v, angle.cos(), angle.sin(), want, slots)
        else:
            store_kv(k, v, have, slots)
            store_kv_reference(k, v, want, slots)
        check_pools(have, want, kv)


def broken(dtype: torch.dtype, kv: torch.dtype) -> None:
    """A NaN makes its whole row NaN, as in the C library, and changes no other row. With heads of a power of two and
    others."""
    for dim in (16, 24):
        x = torch.randn(4, 3 * dim).to(dtype)
        x[1, dim + 3], x[2, 3 * dim - 1] = torch.nan, -torch.nan  # a key of slot 5, a value of slot 2
        _, k, v = (part.unflatten(1, (1, dim)) for part in x.split(dim, dim=1))
        slots = torch.tensor([0, 5, 2, 7])
        have, want = (strided_cache(4, 1, 3, dim, kv) for _ in range(2))
        store_kv(k, v, have, slots)
        store_kv_reference(k, v, want, slots)
        for ours, theirs, at in zip(
            have.rows_reference(torch.arange(4)), want.rows_reference(torch.arange(4)), (1, 2), strict=True
        ):
            is_nan = ours[0, slots].isnan()
            assert is_nan[at].all() and is_nan.sum() == dim
            largest = theirs[0, slots].nan_to_num().abs().amax(-1, keepdim=True)
            assert ((ours - theirs)[0, slots].nan_to_num().abs() <= 0.16 * largest).all()


def check_pools(have: KVCache, want: KVCache, kv: torch.dtype) -> None:
    """At most three bytes differ, and elements by at most one step."""
    ours, theirs = pool_of(have), pool_of(want)
    changed = ours != theirs
    if kv == torch.float8_e4m3fn:  # Triton 3.6's interpreter negates 0 to 0
        changed &= (ours | theirs) & 0x7F != 0
    assert changed.sum() <= 3, f"{changed.sum()} bytes differ"
    blocks = torch.arange(4)
    for ours, theirs in zip(have.rows_reference(blocks), want.rows_reference(blocks), strict=True):
        largest = theirs.nan_to_num().abs().amax(-1, keepdim=True)
        assert ((ours - theirs).nan_to_num().abs() <= 0.16 * largest).all()


def normed(dtype: torch.dtype, kv: torch.dtype, offset: float) -> None:
    """One kernel for norms, rotary and store has the bits of norms and then rotary with the store, up to the order in
    which a GPU adds the squares of a head. Heads of a power of two and others are rotated in whole and in part."""
    tokens, heads, kv_heads = 5, 6, 3
    slots = torch.tensor([4, -1, 0, 11, 3])
    for dim, rot_dim in ((32, 32), (32, 8), (24, 24), (24, 10)):
        fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype) * 3
        parts = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
        angle = torch.randn(tokens, rot_dim // 2).repeat(1, 2)
        tables = angle.cos().to(dtype), angle.sin().to(dtype)
        q_norm, k_norm = (RmsNorm(torch.randn(dim).to(dtype), 1e-5, offset) for _ in range(2))
        have, want = (strided_cache(4, kv_heads, 3, dim, kv) for _ in range(2))
        rotated = norm_rotate_and_store(q_norm, k_norm, q, k, v, *tables, have, slots)
        apart = rotary_and_store(q_norm(q), k_norm(k), v, *tables, want, slots)
        if not rotated.is_cuda:
            assert torch.equal(rotated, apart) and torch.equal(pool_of(have), pool_of(want))
        elif kv in QUANTISED:
            agree(rotated, apart)
            check_pools(have, want, kv)
        else:
            agree(rotated, apart)
            agree(have.k.nan_to_num(), want.k.nan_to_num())
            assert torch.equal(have.v.nan_to_num(), want.v.nan_to_num())


def rows(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> None:
    torch.manual_seed(0)
    for dtype in dtypes:
        x, residual, weight = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
        for offset in (0.0, 1.0):
            norm = RmsNorm(weight, 1e-6, offset)
            agree(norm(x), rms_norm_reference(x, weight, 1e-6, None, offset)[0])
            assert torch.equal(norm(x[1:2]), norm(x)[1:2])
            last = RmsNorm(weight, 1e-6, offset, rounds_last=True)
            agree(last(x), rms_norm_reference(x, weight, 1e-6, None, offset, rounds_last=True)[0])
            for have, wanted in zip(
                norm.add_and_norm(x, residual), rms_norm_reference(x, weight, 1e-6, residual, offset), strict=True
            ):
                agree(have, wanted)
        for activation in ("silu", "gelu_tanh"):
            gate_up = torch.randn(3, 70).to(dtype)[:, :66] * 20
            agree(silu_mul(gate_up, activation), silu_mul_reference(gate_up, activation))
        rotary(dtype)
        normed(dtype, dtype, 0.0)
        normed(dtype, dtype, 1.0)
    pool = torch.randint(0, 255, (6, 4104), dtype=torch.uint8)
    want = pool.clone()
    want[[0, 5]] = want[[2, 2]]
    copy_blocks(pool, torch.tensor([2, 2]), torch.tensor([0, 5]))
    assert torch.equal(pool, want)
    for width in (4096, 4099):  # eight bytes at a time, and one; both leave the end of each row alone
        source, target = torch.tensor([5, 1, 3]), torch.tensor([4, 0, 2])
        pool = torch.randint(0, 255, (6, 4104), dtype=torch.uint8)
        want = pool.clone()
        want[target, :width] = want[source, :width]
        copy_blocks(pool[:, :width], source, target)
        assert torch.equal(pool, want)
    # Rows shorter and longer than a program's step, and an empty one, of a table with a wider stride.
    tables, counts = torch.arange(4 * 3000, dtype=torch.int32).reshape(4, 3000)[:, :2500], [2500, 0, 1, 1024]
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    indices = torch.full((sum(counts) + 5,), -1, dtype=torch.int32)
    gather_pages(tables, indptr, indices)
    parts = [table[:count] for table, count in zip(tables, counts, strict=True)]
    assert torch.equal(indices, torch.cat((*parts, torch.full((5,), -1, dtype=torch.int32))))


def sums() -> None:
    """Checksums of blocks are the reference's, in parts of a block and in any order of blocks; one bit changes them."""
    for lines in (1, 5, 513, 1025):
        pool = torch.randint(0, 256, (4, lines * 64 + 64), dtype=torch.uint8)[:, : lines * 64]
        rows = torch.tensor([2, 0, 3])
        want = transfer_blocks_reference(pool, rows, torch.empty(3, lines * 64, dtype=torch.uint8), torch.arange(3))
        assert torch.equal(sum_blocks(pool, rows), want)
        pool[0, -1] ^= 128
        assert (sum_blocks(pool, rows) != want).tolist() == [False, True, False]
    assert sum_blocks(pool, rows[:0]).tolist() == []


def empty() -> None:
    """Steps without a row launch nothing, and nothing is written."""
    none, slots, ids = torch.zeros(0, 24), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int32)
    heads = torch.zeros(0, 1, 24)
    RmsNorm(torch.randn(24), 1e-6).add_and_norm(none, none)
    silu_mul(none)
    for kv in (torch.float32, torch.int8):
        cache = strided_cache(2, 1, 3, 24, kv)
        before = pool_of(cache).clone()
        store_kv(heads, heads, cache, slots)
        rotary_and_store(heads, heads, heads, none, none, cache, slots)
        assert torch.equal(pool_of(cache), before)
    copy_blocks(torch.zeros(2, 64, dtype=torch.uint8), slots, slots)
    floats, ints = torch.zeros(0), torch.zeros(0, dtype=torch.int32)
    filter_floor(none, floats, ints, floats, floats)
    launch_draw(none, floats, floats, slots, ints, slots, slots.clone())
    drawn = draw_part(none, 3, temperature=floats, floors=floats, seed=slots, choice=ints, position=slots)
    assert [len(part) for part in drawn] == [0, 0]
    apply_token_mask(torch.zeros(2, 24), slots, torch.zeros(0, 1, dtype=torch.int32))
    apply_penalties(none, ids, slots, ints, ints, floats, floats, floats)
    assert [len(part) for part in launch_logprobs(none, slots)] == [0, 0, 0]


def rotary(dtype: torch.dtype) -> None:
    """Also the plain store. Both skip slot -1 and write no other slot."""
    fused = torch.randn(4, 5 * 24).to(dtype)
    q, k, v = (part.unflatten(1, (-1, 24)) for part in fused.split([72, 24, 24], dim=1))
    angle = torch.randn(4, 8).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    slots = torch.tensor([4, -1, 0, 11])
    for with_rotary in (False, True):
        have, want = (strided_cache(4, 1, 3, 24, dtype) for _ in range(2))
        if with_rotary:
            rotated = rotary_and_store(q, k, v, cos, sin, have, slots)
            agree(rotated, rotary_and_store_reference(q, k, v, cos, sin, want, slots))
        else:
            store_kv(k, v, have, slots)
            store_kv_reference(k, v, want, slots)
        agree(have.k.nan_to_num(), want.k.nan_to_num())
        want.k.copy_(have.k)  # the two may round differently; all other bytes are equal
        assert torch.equal(pool_of(have), pool_of(want))
