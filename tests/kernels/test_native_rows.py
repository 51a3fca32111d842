"""The row-wise operations on CPU against float32 torch, with odd shapes and strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from coatcheck.kernels.attention.rotary import rotary_and_store, rotary_and_store_reference
from coatcheck.kernels.kv.copy_blocks import copy_blocks
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import quantise_reference, widen_reference
from coatcheck.kernels.kv.store_kv import store_kv, store_kv_reference
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.layers.rms_norm import RmsNorm, rms_norm_reference
from coatcheck.kernels.layers.silu_mul import silu_mul, silu_mul_reference
from tests.examples import pairwise
from tests.kernels.caches import QUANTISED, pool_of, strided_cache
from tests.kernels.cpu_classes import each_class

pytestmark = [pytest.mark.usefixtures("cpu_class"), each_class("rms_norm")]

SENTINEL = 7.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ulps(dtype: torch.dtype) -> dict[str, Any]:
    """Tolerances of one rounding: the last bit of the dtype may differ, because both compute in float32."""
    return {torch.float32: dict(rtol=2e-6, atol=2e-6), torch.bfloat16: dict(rtol=2**-7, atol=1e-6)}.get(
        dtype, dict(rtol=2**-10, atol=1e-6)
    )


@pairwise(
    ("dtype", DTYPES),
    ("shape", [(0, 16), (1, 1), (3, 17), (5, 768), (33, 1000)]),
    ("offset", [0.0, 1.0]),
    ("with_residual", [False, True]),
)
def test_rms_norm_agrees_with_its_reference(
    dtype: torch.dtype, shape: tuple[int, int], offset: float, with_residual: bool
) -> None:
    """RmsNorm gives what the float32 formula gives, and with a residual also the rounded sum."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    residual = torch.randn(shape).to(dtype) if with_residual else None
    norm = RmsNorm(weight, 1e-6, offset)
    want, want_total = rms_norm_reference(x, weight, 1e-6, residual, offset)
    have, total = (norm(x), x) if residual is None else norm.add_and_norm(x, residual)
    assert torch.equal(total, want_total)
    torch.testing.assert_close(have, want, **ulps(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_follows_transformers_rounding(dtype: torch.dtype) -> None:
    """Llama's norm is cast before the weight and Gemma's after it, as in transformers: at most one rounding apart."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(1)
    x, weight = torch.randn(50, 96).to(dtype), torch.randn(96).to(dtype)
    for module, offset in ((LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        theirs = module(96, eps=1e-6).to(dtype)
        theirs.weight.data = weight
        ours = RmsNorm(weight, 1e-6, offset)(x)
        torch.testing.assert_close(ours, theirs(x).data, **ulps(dtype))
        if dtype == torch.bfloat16:
            assert (ours != theirs(x)).float().mean() < 0.01


def test_rms_norm_takes_strided_heads() -> None:
    """A norm over the heads of a fused projection takes the slice, which is not contiguous."""
    fused = torch.randn(7, 6 * 32).bfloat16()
    heads, weight = fused[:, 32:96].unflatten(1, (2, 32)), torch.randn(32).bfloat16()
    norm = RmsNorm(weight, 1e-5)
    assert torch.equal(norm(heads), norm(heads.contiguous()))


@pairwise(
    ("dtype", DTYPES),
    ("activation", ["silu", "gelu_tanh"]),
    ("shape", [(0, 8), (1, 2), (3, 34), (2, 5000), (40, 1026)]),
)
def test_silu_mul_agrees_with_its_reference(dtype: torch.dtype, activation: str, shape: tuple[int, int]) -> None:
    """The gated activation gives the float32 result rounded once, for strided rows and for very large inputs too."""
    torch.manual_seed(2)
    wide = torch.randn(shape[0], shape[1] + 6).to(dtype)
    gate_up = wide[:, : shape[1]]
    if shape[0]:
        gate_up[0, 0], gate_up[-1, shape[1] // 2 - 1] = -200.0, 200.0
    have = silu_mul(gate_up, activation)
    torch.testing.assert_close(have, silu_mul_reference(gate_up, activation), **ulps(dtype))
    assert torch.isfinite(have).all()


@pairwise(
    ("dtype", DTYPES),
    ("kv", ["same", *QUANTISED, torch.float16]),
    ("tokens", [0, 1, 5, 40]),
)
def test_store_kv_writes_its_slots_and_nothing_else(dtype: torch.dtype, kv: Any, tokens: int) -> None:
    """Strided keys and values are stored in their slots. Slot -1 is skipped, and no other byte changes."""
    torch.manual_seed(3)
    fused = torch.randn(tokens, 8 * 16).to(dtype)
    k, v = fused[:, 64:96].unflatten(1, (2, 16)), fused[:, 96:128].unflatten(1, (2, 16))
    slots = torch.randperm(9 * 5)[:tokens]
    slots[1::4] = -1
    have, want = (strided_cache(9, 2, 5, 16, dtype if kv == "same" else kv, fill=65) for _ in range(2))
    before = pool_of(have).clone()
    store_kv(k, v, have, slots)
    store_kv_reference(k, v, want, slots)
    assert torch.equal(pool_of(have), pool_of(want))
    assert (pool_of(have) != before).any() or not tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", QUANTISED)
def test_rows_of_any_size_are_stored_as_the_reference_does(dtype: torch.dtype, kv: torch.dtype) -> None:
    """Rows of zeros, ties, and numbers at both ends of float16's range and beyond are stored as the same bytes."""
    x = torch.randn(40, 1, 32) * torch.logspace(-12, 9, 40)[:, None, None]
    x[3], x[5, 0, 7], x[20] = 0, 1e3, torch.arange(32) / 2
    x = x.to(dtype)
    have, want = (strided_cache(5, 1, 8, 32, kv, fill=65) for _ in range(2))
    store_kv(x, -x, have, torch.arange(40))
    store_kv_reference(x, -x, want, torch.arange(40))
    assert torch.equal(pool_of(have), pool_of(want))
    back = have.rows_reference(torch.arange(5))[0][0]
    assert torch.isfinite(back).all() and not back[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("at", [0, 31])
def test_a_row_with_a_nan_stays_nan(dtype: torch.dtype, kv: torch.dtype, at: int) -> None:
    """A NaN makes its whole row NaN. It became a finite number, which hid a model's error. Other rows are unchanged."""
    x = torch.randn(8, 1, 32).to(dtype)
    x[3, 0, at] = math.nan
    have, want = (strided_cache(1, 1, 8, 32, kv, fill=65) for _ in range(2))
    store_kv(x, -x, have, torch.arange(8))
    store_kv_reference(x, -x, want, torch.arange(8))
    rows = zip(have.rows_reference(torch.tensor([0])), want.rows_reference(torch.tensor([0])), strict=True)
    for own, reference in rows:
        assert own[0, 3].isnan().all()
        torch.testing.assert_close(own, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kv", "max_error"), [(torch.float8_e4m3fn, 0.04), (torch.int8, 0.005), (torch.uint8, 0.08)])
def test_quantising_loses_little(kv: torch.dtype, max_error: float) -> None:
    """A quantised row is within half a step of the original: a step of 448 in fp8 (relative there), 127 or 7."""
    x = torch.randn(200, 64)
    back = widen_reference(*quantise_reference(x, kv))
    assert ((back - x).abs().amax(-1) / x.abs().amax(-1)).max() < max_error


@pairwise(
    ("dtype", DTYPES),
    ("table", ["same", "float32"]),
    ("tokens, dim, rot_dim", [(0, 16, 16), (1, 16, 8), (7, 80, 80), (50, 64, 64), (3, 6, 2)]),
)
def test_rotary_agrees_with_its_reference(dtype: torch.dtype, table: str, tokens: int, dim: int, rot_dim: int) -> None:
    """The first rot_dim elements of every head are rotated. Keys are stored rotated, in pools of any dtype."""
    torch.manual_seed(4)
    fused = torch.randn(tokens, 6 * dim).to(dtype)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in fused.split([4 * dim, dim, dim], dim=1))
    angle = torch.randn(tokens, rot_dim // 2).repeat(1, 2)
    cos, sin = (t.to(dtype if table == "same" else torch.float32) for t in (angle.cos(), angle.sin()))
    slots = torch.randperm(60)[:tokens]
    slots[2::3] = -1
    kept = slots >= 0
    cache, reference = (strided_cache(20, 1, 3, dim, dtype) for _ in range(2))
    rotated = rotary_and_store(q, k, v, cos, sin, cache, slots)
    torch.testing.assert_close(rotated, rotary_and_store_reference(q, k, v, cos, sin, reference, slots), **ulps(dtype))
    stored = cache.k[slots[kept] // 3, :, slots[kept] % 3]
    torch.testing.assert_close(stored, reference.k[slots[kept] // 3, :, slots[kept] % 3], **ulps(dtype))
    assert torch.equal(cache.v[slots[kept] // 3, :, slots[kept] % 3], v[kept])

    for kv in (*QUANTISED, torch.float16):
        ours, theirs = (strided_cache(20, 1, 3, dim, kv) for _ in range(2))
        rotary_and_store(q, k, v, cos, sin, ours, slots)
        store_kv_reference(stored, v[kept], theirs, slots[kept])
        assert torch.equal(pool_of(ours), pool_of(theirs))


def test_rotary_equals_transformers_in_float32() -> None:
    """With rot_dim = dim, the rotated queries and keys equal those of transformers' llama."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, angle = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 8).repeat(1, 2)
    theirs = apply_rotary_pos_emb(
        q[None].transpose(1, 2), k[None].transpose(1, 2), angle.cos()[None], angle.sin()[None]
    )
    cache = KVCache(*torch.zeros(2, 1, 2, 5, 16))
    rotated = rotary_and_store(q, k, k, angle.cos(), angle.sin(), cache, torch.arange(5))
    torch.testing.assert_close(rotated, theirs[0].transpose(1, 2)[0])
    torch.testing.assert_close(cache.k[0], theirs[1][0])


def test_copy_blocks_copies_whole_blocks() -> None:
    """Every byte of a destination block is copied. No other block changes, and an empty list copies nothing."""
    pool = torch.randint(0, 255, (9, 70000), dtype=torch.uint8)
    before = pool.clone()
    copy_blocks(pool, torch.tensor([3, 3, 5]), torch.tensor([0, 8, 1]))
    copy_blocks(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    before[[0, 8, 1]] = before[[3, 3, 5]]
    assert torch.equal(pool, before)


def test_a_refusal_names_the_tensor() -> None:
    """A wrong shape, dtype or stride is refused before anything is written, and the message names the tensor."""
    x, part = torch.zeros(2, 4, 16), torch.full((3, 4, 2, 16), SENTINEL)
    cache, units = KVCache(part, part.clone()), torch.ones(3, 4, 2).half()
    slots, table = torch.tensor([0, 1]), torch.ones(2, 16)
    cases = [
        ("weight", lambda: RmsNorm(torch.ones(8), 1e-6)(x)),
        ("residual", lambda: RmsNorm(torch.ones(16), 1e-6).add_and_norm(x, x.double())),
        ("x", lambda: RmsNorm(torch.ones(4), 1e-6)(x.transpose(1, 2))),
        ("gate_up", lambda: silu_mul(torch.zeros(2, 5))),
        ("activation", lambda: silu_mul(torch.zeros(2, 4), "relu")),
        ("slot_mapping", lambda: store_kv(x, x, cache, slots.int())),
        ("slot_mapping", lambda: store_kv(x, x, cache, torch.tensor([0]))),
        ("v", lambda: store_kv(x, x[:1], cache, slots)),
        ("k", lambda: store_kv(x.transpose(1, 2), x, cache, slots)),
        ("v", lambda: store_kv(x, x.bfloat16(), cache, slots)),
        ("k", lambda: store_kv(x[:, :2], x[:, :2], cache, slots)),
        ("k_cache", lambda: KVCache(part.transpose(1, 2), part)),
        ("k_cache", lambda: KVCache(part.double(), part)),
        ("v_cache", lambda: KVCache(part, part.bfloat16())),
        ("v_cache", lambda: KVCache(part, part[:, :1])),
        ("k_scales", lambda: KVCache(part, part, units, units)),
        ("k_scales", lambda: KVCache(part.char(), part.char())),
        ("v_scales", lambda: KVCache(part.char(), part.char(), units, units.float())),
        ("v_scales", lambda: KVCache(part.byte(), part.byte(), units, units[:2])),
        (
            "k_scales",
            lambda: KVCache(part.char(), part.char(), torch.ones(3, 2, 4).half().transpose(1, 2), units),
        ),
        ("cos", lambda: rotary_and_store(x, x, x, torch.ones(2, 18), torch.ones(2, 18), cache, slots)),
        ("sin", lambda: rotary_and_store(x, x, x, table, table.double(), cache, slots)),
        ("pool", lambda: copy_blocks(part, slots, slots)),
        ("dst", lambda: copy_blocks(torch.zeros(2, 2, dtype=torch.uint8), slots, slots[:1])),
        ("slot_mapping", lambda: store_kv(x, x, cache, slots.to("meta"))),
    ]
    for name, call in cases:
        with pytest.raises(LaunchRefused, match=f"^{name}: expected "):
            call()
    assert (part == SENTINEL).all() and math.isfinite(SENTINEL)
