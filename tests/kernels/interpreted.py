"""Run by test_triton_interpreted.py with TRITON_INTERPRET=1: each kernel's launcher on CPU tensors."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from coatcheck.kernels.copy_blocks import launch_copy_blocks
from coatcheck.kernels.paged_decode import launch_decode
from coatcheck.kernels.paged_prefill import launch_prefill
from coatcheck.kernels.rms_norm import launch_rms_norm, rms_norm_reference
from coatcheck.kernels.rotary import apply_rotary_reference, launch_rotary, rotary_and_store_reference
from coatcheck.kernels.sample import filter_reference, launch_draw, noise_bits_reference, sample_reference
from coatcheck.kernels.silu_mul import launch_silu_mul, silu_mul_reference
from coatcheck.kernels.store_kv import launch_store_kv, store_kv_reference
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
        changed = (pool_of(have) != pool_of(want)).sum()
        assert changed <= 3, f"{changed} bytes differ"
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
    launch_copy_blocks(pool, torch.tensor([2, 2]), torch.tensor([0, 5]))
    assert torch.equal(pool, want)


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
    kept = filter_reference(logits / torch.where(temperature > 0, temperature, 1.0)[:, None], top_k, top_p, min_p)
    floors = torch.where(kept > float("-inf"), kept, float("inf")).amin(dim=-1)
    out, bits = torch.empty(4, dtype=torch.int64), torch.empty(4, 3000, dtype=torch.int64)
    launch_draw(logits, temperature, floors, seed, choice, position, out, bits)
    assert torch.equal(bits, noise_bits_reference(seed, choice, position, torch.arange(3000)))
    assert torch.equal(out, sample_reference(logits, temperature, top_k, top_p, min_p, seed, choice, position))


if __name__ == "__main__":
    {"attention": attention, "quantised": quantised, "rows": rows, "sampling": sampling}[sys.argv[1]]()
    print("agreed")
