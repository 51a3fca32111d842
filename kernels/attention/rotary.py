"""Rotary position embedding, half-rotation (NeoX) style, on the first rot_dim elements of each head.

    x1, x2 = x[:rot_dim/2], x[rot_dim/2:rot_dim]
    y = [x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[rot_dim:]]      (float32 inside, rounded once)

cos1 and cos2 are the halves of cos [tokens, rot_dim]; transformers makes them equal. Shapes: q [tokens, heads, dim], k
and v [tokens, kv_heads, dim], with contiguous heads in each token and any stride over tokens; cos and sin contiguous,
in q's dtype or float32. The rotated k is written directly to the cache (see store_kv.py). One program rotates several
heads of one token. The Triton kernel can first apply the RMS norms that models such as Qwen3 have on each head of q and
k.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS
from coatcheck.kernels.kv.store_kv import (
    _head_roots,
    _normed,
    _store_rows,
    check_store,
    library_for_store,
    pick_rows,
    store_kv_reference,
)
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_heads, once_per_geometry, refuse


@triton.jit
def _rotate_heads(
    x, x_row, y, y_row, cos, sin, heads, inside, ROT: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, weight=None, eps=0.0, OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """Normalise a token's heads if there is a weight, rotate them, and copy the elements after rot_dim. HALF: at least
    half of rot_dim. If there is no weight, y may be x."""
    i = tl.arange(0, HALF)
    half = i < ROT // 2
    mask = inside[:, None] & half[None]
    roots = None
    if weight is not None:
        roots = _head_roots(x, x_row, heads, inside, eps, DIM, BLOCK)
    at, to = x + heads[:, None] * x_row + i[None], y + heads[:, None] * y_row + i[None]
    a, b = tl.load(at, mask, other=0.0), tl.load(at + ROT // 2, mask, other=0.0)
    a = _normed(a, roots, weight, i, half, OFFSET).to(tl.float32)
    b = _normed(b, roots, weight, ROT // 2 + i, half, OFFSET).to(tl.float32)
    cos_a, cos_b = tl.load(cos + i, half).to(tl.float32)[None], tl.load(cos + ROT // 2 + i, half).to(tl.float32)[None]
    sin_a, sin_b = tl.load(sin + i, half).to(tl.float32)[None], tl.load(sin + ROT // 2 + i, half).to(tl.float32)[None]
    tl.store(to, (a * cos_a - b * sin_a).to(x.dtype.element_ty).to(y.dtype.element_ty), mask)
    tl.store(to + ROT // 2, (b * cos_b + a * sin_b).to(x.dtype.element_ty).to(y.dtype.element_ty), mask)
    if ROT < DIM:
        _copy_heads(x, y, y_row, heads, inside, ROT, DIM, BLOCK, weight, roots, OFFSET)


@triton.jit
def _copy_heads(
    x, y, y_row, heads, inside, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, weight=None, roots=None,
    OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """Copy the elements of a token's heads from FIRST on, normalised if there is a weight."""
    i = tl.arange(0, BLOCK)
    copied = (i >= FIRST) & (i < DIM)
    mask = inside[:, None] & copied[None]
    own = _normed(tl.load(x + heads[:, None] * DIM + i[None], mask, other=0.0), roots, weight, i, copied, OFFSET)
    tl.store(y + heads[:, None] * y_row + i[None], own.to(y.dtype.element_ty), mask)


@triton.jit
def _rotary(
    q, k, v, cos, sin, q_weight, k_weight, out, k_cache, v_cache, k_scales, v_scales, slots,
    q_stride, k_stride, v_stride, k_block, v_block, k_scales_block, v_scales_block, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS  # of the query heads; those of k and v follow
    cos += token * ROT
    sin += token * ROT
    if tile < TILES:
        heads = tile * ROWS + tl.arange(0, ROWS)
        _rotate_heads(
            q + token * q_stride, DIM, out + token * HEADS * DIM, DIM, cos, sin, heads, heads < HEADS, ROT, DIM, HALF,
            BLOCK, q_weight, eps, OFFSET,
        )  # fmt: skip
    else:
        heads = (tile - TILES) * ROWS + tl.arange(0, ROWS)
        inside = heads < KV_HEADS
        from_k, from_v = k + token * k_stride, v + token * v_stride
        slot = tl.load(slots + token)
        if slot >= 0:
            WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
            block, row = slot // SIZE, slot % SIZE
            to_k, to_v = k_cache + block * k_block + row * WIDTH, v_cache + block * v_block + row * WIDTH
            if KIND > 0:
                BYTES: tl.constexpr = BLOCK // 2 if KIND == 3 else BLOCK
                scale_k, scale_v = k_scales + block * k_scales_block + row, v_scales + block * v_scales_block + row
                _store_rows(
                    from_k, cos, sin, to_k, scale_k, heads, inside, SIZE, ROT, DIM, KIND, BYTES, k_weight, eps, OFFSET
                )
                _store_rows(from_v, cos, sin, to_v, scale_v, heads, inside, SIZE, 0, DIM, KIND, BYTES)
            else:
                _rotate_heads(
                    from_k, DIM, to_k, SIZE * DIM, cos, sin, heads, inside, ROT, DIM, HALF, BLOCK, k_weight, eps, OFFSET
                )
                _copy_heads(from_v, to_v, SIZE * DIM, heads, inside, 0, DIM, BLOCK)


class HeadNorms(NamedTuple):
    """RMS norms over each head of q and of k. Weights [dim], in q's dtype. `offset`: that of RmsNorm."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    """Return the rotated q, contiguous [tokens, heads, dim]. Store the rotated k, and v, in their slots; slot -1 is
    skipped."""
    _check(q, k, v, cos, sin, slot_mapping, cache.kv_heads, cache.head_dim, cache.device)
    if uses_triton(q):
        return _launch(q, k, v, cos, sin, cache, slot_mapping, None)
    library = library_for_store(k, cache)
    if library is None:
        return rotary_and_store_reference(q, k, v, cos, sin, cache, slot_mapping)
    out = torch.empty(q.shape, dtype=q.dtype)
    tokens, heads, dim = q.shape
    library.rotary(
        native.ROTARY.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            cache.pointer, slot_mapping.data_ptr(), tokens, heads, k.shape[1], dim, cos.shape[1],
            q.stride(0), k.stride(0), v.stride(0), heads * dim,
            native.TYPES[q.dtype], native.TYPES[cos.dtype],
        )
    )  # fmt: skip
    return out


def launch_with_norms(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor, norms: HeadNorms
) -> Tensor:
    """`rotary_and_store` of the normalised heads of q and k, in one Triton kernel.

    The norms have RmsNorm's operations and roundings: a norm is rounded to q's dtype before the rotation. Only the
    order in which a head's squares are added may differ from RmsNorm's.
    """
    _check(q, k, v, cos, sin, slot_mapping, cache.kv_heads, cache.head_dim, cache.device)
    _check_norms(q, norms.q_weight, norms.k_weight)
    return _launch(q, k, v, cos, sin, cache, slot_mapping, norms)


@once_per_geometry
def _check(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, kv_heads: int, head_dim: int,
    device: torch.device,
) -> None:  # fmt: skip
    check_store(k, v, slot_mapping, kv_heads, head_dim, device)
    check_heads("q", q, (len(k), None, head_dim), k.dtype, device)
    rot_dim = cos.shape[-1]
    if rot_dim % 2 or rot_dim > q.shape[2]:
        refuse("cos", f"an even rot_dim of at most {q.shape[2]}, the dim of a head", rot_dim)
    check_dtype("cos", cos, q.dtype, torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        check_dense(name, table, (q.shape[0], rot_dim), cos.dtype, q.device)


@once_per_geometry
def _check_norms(q: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_dense(name, weight, (q.shape[2],), q.dtype, q.device)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor:  # fmt: skip
    out = q.new_empty(q.shape)
    tokens, heads, dim = q.shape
    if tokens == 0:
        return out
    kv_heads, block = k.shape[1], triton.next_power_of_2(dim)
    rows, warps = pick_rows(min(heads, kv_heads), block)
    q_weight, k_weight, eps, offset = (None, None, 0.0, 0.0) if norms is None else norms
    _rotary[(tokens, -(-heads // rows) - (-kv_heads // rows))](
        q, k, v, cos, sin, q_weight, k_weight, out, cache.k_bytes, cache.v_bytes, cache.k_scales, cache.v_scales,
        slot_mapping,
        q.stride(0), k.stride(0), v.stride(0), cache.k.stride(0), cache.v.stride(0),
        cache.scales_stride(0), cache.scales_stride(1), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROT=cos.shape[1], SIZE=cache.block_size,
        KIND=KINDS.get(cache.dtype, 0), ROWS=rows, HALF=triton.next_power_of_2(cos.shape[1] // 2), BLOCK=block,
        OFFSET=offset, num_warps=warps,
    )  # fmt: skip
    return out


def rotary_and_store_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    store_kv_reference(rotate_reference(k, cos, sin), v, cache, slot_mapping)
    return rotate_reference(q, cos, sin)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rot_dim = cos.shape[-1]
    wide = x[..., :rot_dim].float()
    x1, x2 = wide.chunk(2, dim=-1)
    rotated = wide * cos.float()[:, None] + torch.cat((-x2, x1), dim=-1) * sin.float()[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rot_dim:]), dim=-1)
