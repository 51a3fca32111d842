"""Stores, copies, norms, activations and the sampler for bench/gpu.py: error, and bytes over the memory bandwidth."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.kernels.attention.rotary import rotary_and_store, rotary_and_store_reference
from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.kv.store_kv import store_kv, store_kv_reference
from coatcheck.kernels.layers.rms_norm import RmsNorm, norm_rotate_and_store, rms_norm_reference
from coatcheck.kernels.layers.silu_mul import silu_mul, silu_mul_reference
from coatcheck.kernels.sampling.penalties import apply_penalties, apply_penalties_reference
from coatcheck.kernels.sampling.sample import sample, sample_reference
from coatcheck.kernels.sampling.token_mask import apply_token_mask, apply_token_mask_reference
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.runner.kv_memory import allocate_kv_pool, make_layer_caches

_TARGET = 0.8


def rows(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Row-wise operations over more than 64 MB each, so that memory bandwidth limits them."""
    tokens = 64 if quick else 16384

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    x, residual, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
    norm, want = RmsNorm(weight, 1e-6), rms_norm_reference(x, weight, 1e-6, residual)
    yield _judged(
        "add and RMS norm",
        partial(norm.add_and_norm, x, residual),
        4 * x.nbytes,
        _error(norm.add_and_norm(x, residual)[0], want[0]),
        device,
        roofs,
        quick,
    )
    gate_up = random(tokens, 16384)
    yield _judged(
        "SiLU and multiply",
        partial(silu_mul, gate_up),
        gate_up.nbytes * 3 // 2,
        _error(silu_mul(gate_up), silu_mul_reference(gate_up)),
        device,
        roofs,
        quick,
    )
    del gate_up, x, residual
    yield from _stores(tokens, device, roofs, quick)
    yield _head_norms(tokens, device, roofs, quick)
    pool = torch.randint(0, 255, (256, 64 << 10 if quick else 2 << 20), dtype=torch.uint8, device=device)
    order = torch.randperm(256, device=device)
    source, target, before = order[:128].contiguous(), order[128:].contiguous(), pool.clone()
    copy_blocks(pool, source, target)
    before[target] = before[source]
    yield _judged(
        "copy blocks",
        partial(copy_blocks, pool, source, target),
        pool.nbytes,
        float(not torch.equal(pool, before)),
        device,
        roofs,
        quick,
    )


def _stores(tokens: int, device: torch.device, roofs: Roofs, quick: bool) -> Iterator[Measurement]:
    """Rotary with the store of K and V, into each kind of pool, and the plain store."""
    heads, kv_heads, dim = 32, 8, 128
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).bfloat16()
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angle = torch.rand(tokens, dim // 2, device=device).repeat(1, 2) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    slots = torch.randperm(tokens, device=device)
    for kv in (KvDtype.BFLOAT16, KvDtype.FP8, KvDtype.INT8, KvDtype.INT4):
        layout = BlockLayout.of([LayerSpec(heads, kv_heads, dim)], 16, kv)
        pools = [allocate_kv_pool(layout, tokens // 16, device) for _ in range(2)]
        ours, theirs = (make_layer_caches(layout, pool)[0] for pool in pools)
        rotated = rotary_and_store(q, k, v, cos, sin, ours, slots)
        error = _error(rotated, rotary_and_store_reference(q, k, v, cos, sin, theirs, slots))
        blocks = torch.arange(tokens // 16, device=device)
        error = max(error, *map(_error, ours.rows_reference(blocks), theirs.rows_reference(blocks)))
        moved = qkv.nbytes + q.numel() * 2 + cos.nbytes * 2 + pools[0].nbytes
        # A rounding that falls the other way is one step of the pool's elements.
        tolerance = {KvDtype.BFLOAT16: 0.02, KvDtype.FP8: 0.15, KvDtype.INT8: 0.02, KvDtype.INT4: 0.16}[kv]
        work = partial(rotary_and_store, q, k, v, cos, sin, ours, slots)
        yield _judged(f"rotary and store, {kv}", work, moved, error, device, roofs, quick, tolerance)
        store_kv(k, v, ours, slots)
        store_kv_reference(k, v, theirs, slots)
        error = max(map(_error, ours.rows_reference(blocks), theirs.rows_reference(blocks)))
        moved = 2 * k.numel() * 2 + pools[0].nbytes
        yield _judged(
            f"store, {kv}", partial(store_kv, k, v, ours, slots), moved, error, device, roofs, quick, tolerance
        )


def _head_norms(tokens: int, device: torch.device, roofs: Roofs, quick: bool) -> Measurement:
    """Norms of q and k with rotary and the store, as Qwen3 0.6B has them, beside the norms and rotary apart."""
    heads, kv_heads, dim = 16, 8, 128
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).bfloat16()
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q_norm, k_norm = (RmsNorm(torch.randn(dim, device=device).bfloat16(), 1e-6) for _ in range(2))
    angle = torch.rand(tokens, dim // 2, device=device).repeat(1, 2) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    slots = torch.randperm(tokens, device=device)
    layout = BlockLayout.of([LayerSpec(heads, kv_heads, dim)], 16, KvDtype.BFLOAT16)
    pools = [allocate_kv_pool(layout, tokens // 16, device) for _ in range(2)]
    ours, theirs = (make_layer_caches(layout, pool)[0] for pool in pools)

    def apart() -> Tensor:
        return rotary_and_store(q_norm(q), k_norm(k), v, cos, sin, theirs, slots)

    work = partial(norm_rotate_and_store, q_norm, k_norm, q, k, v, cos, sin, ours, slots)
    error = max(_error(work(), apart()), _error(pools[0].view(torch.bfloat16), pools[1].view(torch.bfloat16)))
    moved = qkv.nbytes + q.numel() * 2 + cos.nbytes * 2 + pools[0].nbytes
    measured = _judged("norms, rotary and store, 16 / 8 heads", work, moved, error, device, roofs, quick)
    return replace(measured, beside="apart", beside_ms=seconds(apart, device) * 1e3)


def _judged(
    what: str,
    work: Callable[[], object],
    moved: int,
    error: float,
    device: torch.device,
    roofs: Roofs,
    quick: bool,
    tolerance: float = 0.02,
) -> Measurement:
    took = seconds(work, device)
    share = moved / took / roofs.memory
    met = (share >= _TARGET or quick) and error <= tolerance
    return Measurement(
        "rows", f"{what}, {moved / 1e6:.0f} MB", took * 1e3, share, error, target=f"share >= {_TARGET:.0%}", met=met
    )


def _error(have: Tensor, want: Tensor) -> float:
    return float((have.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9))


def sampling(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """The draw, its filters, penalties and masks: equal tokens, and times beside torch's forms."""
    count, vocab = (4, 1000) if quick else (64, 128256)
    torch.manual_seed(1)
    logits = torch.randn(count, vocab, device=device) * 2
    key = {
        "seed": torch.arange(count, device=device),
        "choice": torch.zeros(count, dtype=torch.int32, device=device),
        "position": torch.arange(count, device=device) + 7,
    }
    for what, k, p, least in (
        ("plain", 0, 1.0, 0.0),
        ("top-k 50, top-p 0.9", 50, 0.9, 0.0),
        ("top-p 0.95", 0, 0.95, 0.0),
        ("min-p 0.05", 0, 1.0, 0.05),
    ):
        knobs = {
            "temperature": torch.full((count,), 0.8, device=device),
            "top_k": torch.full((count,), k, dtype=torch.int32, device=device),
            "top_p": torch.full((count,), p, device=device),
            "min_p": torch.full((count,), least, device=device),
        }
        work, reference = partial(sample, logits, **knobs, **key), partial(sample_reference, logits, **knobs, **key)
        differ = float((work() != reference()).float().mean())
        # The mass of top-p is summed in float32 here and in float64 there: a token at its edge may fall either way.
        limit = 0.05 if p < 1 else 0.0
        yield Measurement(
            "sampling",
            f"draw, {count} of {vocab}, {what}",
            seconds(work, device) * 1e3,
            error=differ,
            beside="torch",
            beside_ms=seconds(reference, device) * 1e3,
            target="equal tokens",
            met=differ <= limit,
        )
    tokens = torch.randint(0, vocab, (count, 16 if quick else 2048), dtype=torch.int32, device=device)
    prompt = torch.full((count,), 5, dtype=torch.int32, device=device)
    total = torch.full((count,), tokens.shape[1] - 1, dtype=torch.int32, device=device)
    amounts = [torch.full((count,), amount, device=device) for amount in (1.2, 0.3, 0.2)]
    history = tokens, torch.arange(count, device=device), prompt, total
    have, want = logits.clone(), logits.clone()
    apply_penalties(have, *history, *amounts)
    apply_penalties_reference(want, *history, *amounts)
    error = _error(have, want)
    yield Measurement(
        "sampling",
        f"penalties, {count} of {vocab}",
        seconds(partial(apply_penalties, have, *history, *amounts), device) * 1e3,
        error=error,
        beside="torch",
        beside_ms=seconds(partial(apply_penalties_reference, want, *history, *amounts), device) * 1e3,
        target="error <= 1e-5",
        met=error <= 1e-5,
    )
    every = torch.arange(count, device=device)
    mask = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), dtype=torch.int32, device=device)
    have, want = logits.clone(), logits.clone()
    apply_token_mask(have, every, mask)
    apply_token_mask_reference(want, every, mask)
    yield Measurement(
        "sampling",
        f"masks, {count} of {vocab}",
        seconds(partial(apply_token_mask, have, every, mask), device) * 1e3,
        error=float(not torch.equal(have, want)),
        target="equal",
        met=torch.equal(have, want),
    )
