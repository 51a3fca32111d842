"""Stores keys and values in the KV cache: cache.k[slot // B, h, slot % B] = k[t, h] with slot = slot_mapping[t] and
block size B, and the same for v. Slot -1 is skipped.

Shapes: k, v [tokens, kv_heads, head_dim], contiguous heads in each token, any stride over tokens (so k can be a slice
of a fused projection); slot_mapping int64 [tokens] without repetition; cache: see kv_cache.py. Elements are rounded to
the float dtype of the cache, or quantised as in quantise.py. One program stores a part of a token's heads, or several
whole heads if the cache is quantised.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS, _quantised, _scale_and_inverse, quantise_reference
from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, check_heads, once_per_geometry

NATIVE_MAX_DIM = 512  # the largest head_dim that the C library stores


@triton.jit
def _head_roots(x, x_row, heads, inside, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """sqrt(mean(h ** 2) + eps) of each of a token's heads, the divisor of its RMS norm: float32 [heads]."""
    i = tl.arange(0, BLOCK)
    h = tl.load(x + heads[:, None] * x_row + i[None], inside[:, None] & (i < DIM)[None], other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(h * h, 1) / DIM + eps)


@triton.jit
def _normed(own, roots, weight, i, within, OFFSET: tl.constexpr):
    """Elements i of heads after the RMS norm of layers/rms_norm.py, with its roundings. `own`: the elements before it,
    which are returned unchanged without a weight. `roots`: of `_head_roots`. `within`: which i are used."""
    if weight is not None:
        h = own.to(tl.float32) / roots[:, None]
        w = tl.load(weight + i, within, other=0.0).to(tl.float32) + OFFSET
        if OFFSET == 0.0:
            h = h.to(own.dtype).to(tl.float32)
        own = (h * w[None]).to(own.dtype)
    return own


@triton.jit
def _rotated(
    x, cos, sin, weight, roots, heads, inside, i, ROT: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Elements i of a token's heads, normalised if there is a weight, rotated (see rotary.py) and rounded to x's dtype:
    float32 [heads, len(i)]. ROT 0: not rotated."""
    at = x + heads[:, None] * DIM
    own = tl.load(at + i[None], inside[:, None] & (i < DIM)[None], other=0.0)
    own = _normed(own, roots, weight, i, i < DIM, OFFSET)
    if ROT > 0:
        is_rotated = i < ROT
        first = (i < ROT // 2)[None]
        partner = tl.where(i < ROT // 2, i + ROT // 2, i - ROT // 2)
        other = tl.load(at + partner[None], inside[:, None] & is_rotated[None], other=0.0)
        other = _normed(other, roots, weight, partner, is_rotated, OFFSET).to(tl.float32)
        c = tl.load(cos + i, is_rotated, other=0.0).to(tl.float32)[None]
        s = tl.load(sin + i, is_rotated, other=0.0).to(tl.float32)[None]
        y = own.to(tl.float32) * c + tl.where(first, -other, other) * s
        own = tl.where(is_rotated[None], y.to(x.dtype.element_ty), own)
    return own.to(tl.float32)


@triton.jit
def _has_nan(x):
    """[rows, n] -> whether each row has a NaN. A maximum drops NaN on GPUs."""
    return tl.max((x != x).to(tl.int32), 1) > 0


@triton.jit
def _store_rows(
    x, cos, sin, to, to_scale, heads, inside, SIZE: tl.constexpr,
    ROT: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    weight=None, eps=0.0, OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """Normalise a token's heads if there is a weight, rotate and quantise them, and store them. `to`, `to_scale`:
    addresses of the row of head 0. BLOCK: at least the bytes of a row."""
    i = tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
    roots = None
    if weight is not None:
        roots = _head_roots(x, DIM, heads, inside, eps, DIM, 2 * BLOCK if KIND == 3 else BLOCK)
    if KIND == 3:
        kept = (i < WIDTH)[None]
        low = tl.where(kept, _rotated(x, cos, sin, weight, roots, heads, inside, i, ROT, DIM, OFFSET), 0.0)
        high = tl.where(kept, _rotated(x, cos, sin, weight, roots, heads, inside, i + WIDTH, ROT, DIM, OFFSET), 0.0)
        is_nan = _has_nan(low) | _has_nan(high)
        low, high = tl.where(is_nan[:, None], 0.0, low), tl.where(is_nan[:, None], 0.0, high)
        top = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
        scale, inverse_scale = _scale_and_inverse(tl.where(is_nan, float("nan"), top), KIND)
        y = _quantised(low, inverse_scale[:, None], KIND) | (_quantised(high, inverse_scale[:, None], KIND) << 4)
    else:
        whole = _rotated(x, cos, sin, weight, roots, heads, inside, i, ROT, DIM, OFFSET)
        is_nan = _has_nan(whole)
        whole = tl.where(is_nan[:, None], 0.0, whole)
        scale, inverse_scale = _scale_and_inverse(tl.where(is_nan, float("nan"), tl.max(tl.abs(whole), 1)), KIND)
        y = _quantised(whole, inverse_scale[:, None], KIND)
    rows = heads * SIZE
    tl.store(to + rows[:, None] * WIDTH + i[None], y, inside[:, None] & (i < WIDTH)[None])
    tl.store(to_scale + rows, scale, inside)


@triton.jit
def _store_kv(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, k_block, v_block,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HEADS * DIM
    inside = (at // DIM * SIZE + slot % SIZE) * DIM + at % DIM
    key, value = tl.load(k + token * k_stride + at, mask), tl.load(v + token * v_stride + at, mask)
    tl.store(k_cache + slot // SIZE * k_block + inside, key.to(k_cache.dtype.element_ty), mask)
    tl.store(v_cache + slot // SIZE * v_block + inside, value.to(v_cache.dtype.element_ty), mask)


@triton.jit
def _store_quantised(
    k, v, k_cache, v_cache, k_scales, v_scales, slots,
    k_stride, v_stride, k_block, v_block, k_scales_block, v_scales_block,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
    block, row = slot // SIZE, slot % SIZE
    to_k, to_v = k_cache + block * k_block + row * WIDTH, v_cache + block * v_block + row * WIDTH
    scale_k, scale_v = k_scales + block * k_scales_block + row, v_scales + block * v_scales_block + row
    from_k, from_v = k + token * k_stride, v + token * v_stride
    _store_rows(from_k, from_k, from_k, to_k, scale_k, heads, heads < HEADS, SIZE, 0, DIM, KIND, BLOCK)
    _store_rows(from_v, from_v, from_v, to_v, scale_v, heads, heads < HEADS, SIZE, 0, DIM, KIND, BLOCK)


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    check_store(k, v, slot_mapping, cache.kv_heads, cache.head_dim, cache.device)
    if uses_triton(k):
        return _launch(k, v, cache, slot_mapping)
    library = library_for_store(k, cache)
    if library is None:
        return store_kv_reference(k, v, cache, slot_mapping)
    tokens, kv_heads, dim = k.shape
    kind = native.TYPES[k.dtype]
    library.rotary(
        native.ROTARY.pack(
            0, k.data_ptr(), v.data_ptr(), 0, 0, 0, cache.pointer, slot_mapping.data_ptr(),
            tokens, 0, kv_heads, dim, 0, 0, k.stride(0), v.stride(0), 0, kind, kind,
        )
    )  # fmt: skip


def library_for_store(k: Tensor, cache: KVCache) -> native.Library | None:
    """The C library if it can store these keys, and values of the same shape and dtype, in the cache. Else None."""
    return native.library_for(k) if cache.head_dim <= NATIVE_MAX_DIM else None


@once_per_geometry
def check_store(k: Tensor, v: Tensor, slot_mapping: Tensor, kv_heads: int, head_dim: int, device: torch.device) -> None:
    """The checks of `store_kv` and of `rotary_and_store`. `kv_heads`, `head_dim`, `device`: of the cache."""
    check_dtype("k", k, *FLOATS)
    check_heads("k", k, (None, kv_heads, head_dim), k.dtype, device)
    check_heads("v", v, (len(k), kv_heads, head_dim), k.dtype, device)
    check_dense("slot_mapping", slot_mapping, (len(k),), torch.int64, device)


def _launch(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    if cache.is_quantised:
        block = triton.next_power_of_2(cache.k.shape[3])
        rows, warps = pick_rows(heads, block)
        _store_quantised[(tokens, -(-heads // rows))](
            k, v, cache.k_bytes, cache.v_bytes, cache.k_scales, cache.v_scales, slot_mapping,
            k.stride(0), v.stride(0), cache.k.stride(0), cache.v.stride(0),
            cache.scales_stride(0), cache.scales_stride(1),
            HEADS=heads, DIM=dim, SIZE=cache.block_size, KIND=KINDS[cache.dtype], ROWS=rows, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
        return
    block = min(1024, triton.next_power_of_2(heads * dim))
    _store_kv[(tokens, -(-heads * dim // block))](
        k, v, cache.k, cache.v, slot_mapping, k.stride(0), v.stride(0), cache.k.stride(0), cache.v.stride(0),
        HEADS=heads, DIM=dim, SIZE=cache.block_size, BLOCK=block, num_warps=4,
    )  # fmt: skip


def pick_rows(heads: int, block: int) -> tuple[int, int]:
    """(heads of a program, its warps), for about a thousand elements in each program."""
    rows = max(1, min(triton.next_power_of_2(heads), 1024 // block))
    return rows, max(1, min(4, rows * block // 256))


def store_kv_reference(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    for x, to, scales in ((k[kept], cache.k, cache.k_scales), (v[kept], cache.v, cache.v_scales)):
        if scales is None:
            to[blocks, :, offsets] = x.to(to.dtype)
        else:
            rows, units = quantise_reference(x, to.dtype)
            # As bytes, because not every device can store float8 by index.
            to.view(torch.uint8)[blocks, :, offsets] = rows.view(torch.uint8)
            scales[blocks, :, offsets] = units
