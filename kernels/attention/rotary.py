"""Rotary position embedding, half-rotation (NeoX) style, on the first rot_dim elements of each head.

    x1, x2 = x[:rot_dim/2], x[rot_dim/2:rot_dim]
    y = [x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[rot_dim:]]      (float32 inside, rounded once)

where cos1, cos2 are the halves of cos [tokens, rot_dim] (transformers gives both halves, equal). Shapes: q [tokens,
heads, dim], k [tokens, kv_heads, dim], with dense heads in each token and any stride over tokens; cos and sin dense, in
q's dtype or float32. `rotary_and_store` also stores the rotated k, and v, in the cache (see store_kv.py), so that k is
written only once. One program rotates several heads of one token.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.arch import takes_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.quantise import KINDS
from coatcheck.kernels.kv.store_kv import _store_rows, check_store, pick_rows, serves_store, store_kv_reference
from coatcheck.kernels.launch_check import (
    FLOATS,
    CheckedGeometries,
    check_contiguous,
    check_device,
    check_dtype,
    check_heads,
    check_shape,
    refuse,
)

_checked = CheckedGeometries()


@triton.jit
def _rotate_heads(
    x, y, y_row, cos, sin, heads, inside, ROT: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rotate a token's heads and copy the elements after rot_dim. HALF covers half of rot_dim."""
    i = tl.arange(0, HALF)
    half = i < ROT // 2
    mask = inside[:, None] & half[None]
    at, to = x + heads[:, None] * DIM + i[None], y + heads[:, None] * y_row + i[None]
    a = tl.load(at, mask, other=0.0).to(tl.float32)
    b = tl.load(at + ROT // 2, mask, other=0.0).to(tl.float32)
    cos_a, cos_b = tl.load(cos + i, half).to(tl.float32)[None], tl.load(cos + ROT // 2 + i, half).to(tl.float32)[None]
    sin_a, sin_b = tl.load(sin + i, half).to(tl.float32)[None], tl.load(sin + ROT // 2 + i, half).to(tl.float32)[None]
    tl.store(to, (a * cos_a - b * sin_a).to(x.dtype.element_ty).to(y.dtype.element_ty), mask)
    tl.store(to + ROT // 2, (b * cos_b + a * sin_b).to(x.dtype.element_ty).to(y.dtype.element_ty), mask)
    if ROT < DIM:
        _copy_heads(x, y, y_row, heads, inside, ROT, DIM, BLOCK)


@triton.jit
def _copy_heads(x, y, y_row, heads, inside, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the elements from FIRST on."""
    i = tl.arange(0, BLOCK)
    mask = inside[:, None] & ((i >= FIRST) & (i < DIM))[None]
    own = tl.load(x + heads[:, None] * DIM + i[None], mask, other=0.0)
    tl.store(y + heads[:, None] * y_row + i[None], own.to(y.dtype.element_ty), mask)


@triton.jit
def _rotary(
    q, k, v, cos, sin, q_out, k_out, k_cache, v_cache, k_scales, v_scales, slots,
    q_stride, k_stride, v_stride, q_out_stride, k_out_stride, k_block, v_block, k_scales_block, v_scales_block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, SIZE: tl.constexpr,
    STORE: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS  # of the query heads; those of k and v follow
    cos += token * ROT
    sin += token * ROT
    if tile < TILES:
        heads = tile * ROWS + tl.arange(0, ROWS)
        _rotate_heads(
            q + token * q_stride, q_out + token * q_out_stride, DIM, cos, sin, heads, heads < HEADS, ROT, DIM, HALF,
            BLOCK,
        )  # fmt: skip
    else:
        heads = (tile - TILES) * ROWS + tl.arange(0, ROWS)
        inside = heads < KV_HEADS
        from_k, from_v = k + token * k_stride, v + token * v_stride
        if STORE:
            slot = tl.load(slots + token)
            if slot >= 0:
                WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
                block, row = slot // SIZE, slot % SIZE
                to_k, to_v = k_cache + block * k_block + row * WIDTH, v_cache + block * v_block + row * WIDTH
                if KIND > 0:
                    BYTES: tl.constexpr = BLOCK // 2 if KIND == 3 else BLOCK
                    scale_k = k_scales + block * k_scales_block + row
                    scale_v = v_scales + block * v_scales_block + row
                    _store_rows(from_k, cos, sin, to_k, scale_k, heads, inside, SIZE, ROT, DIM, KIND, BYTES)
                    _store_rows(from_v, cos, sin, to_v, scale_v, heads, inside, SIZE, 0, DIM, KIND, BYTES)
                else:
                    _rotate_heads(from_k, to_k, SIZE * DIM, cos, sin, heads, inside, ROT, DIM, HALF, BLOCK)
                    _copy_heads(from_v, to_v, SIZE * DIM, heads, inside, 0, DIM, BLOCK)
        else:
            to_k = k_out + token * k_out_stride
            _rotate_heads(from_k, to_k, DIM, cos, sin, heads, inside, ROT, DIM, HALF, BLOCK)


def launch_rotary(
    q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor | None,
    cache: KVCache | None, slot_mapping: Tensor | None,
) -> None:  # fmt: skip
    """With a cache, k and v are stored in their slots; without, the rotated k in `k_out`."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    kv_heads, block = k.shape[1], triton.next_power_of_2(dim)
    rows, warps = pick_rows(min(heads, kv_heads), block)
    _rotary[(tokens, -(-heads // rows) - (-kv_heads // rows))](
        q, k, v if v is not None else k, cos, sin, q_out, k_out if k_out is not None else q_out,
        cache.k_bytes if cache is not None else k, cache.v_bytes if cache is not None else k,
        cache.k_scales if cache is not None else None, cache.v_scales if cache is not None else None,
        slot_mapping if slot_mapping is not None else k,
        q.stride(0), k.stride(0), v.stride(0) if v is not None else 0, q_out.stride(0),
        k_out.stride(0) if k_out is not None else 0, cache.k.stride(0) if cache is not None else 0,
        cache.v.stride(0) if cache is not None else 0,
        cache.scales_stride(0) if cache is not None else 0, cache.scales_stride(1) if cache is not None else 0,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROT=cos.shape[1],
        SIZE=cache.block_size if cache is not None else 1,
        STORE=cache is not None, KIND=KINDS.get(cache.dtype, 0) if cache is not None else 0,
        ROWS=rows, HALF=triton.next_power_of_2(cos.shape[1] // 2), BLOCK=block, num_warps=warps,
    )  # fmt: skip


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """The rotated (q, k): dense copies, or with `inplace` the arguments, overwritten."""
    _check_rotary(q, k, cos, sin)
    if takes_triton(q):
        q_out, k_out = (q, k) if inplace else (q.new_empty(q.shape), k.new_empty(k.shape))
        launch_rotary(q, k, None, cos, sin, q_out, k_out, None, None)
        return q_out, k_out
    library = native.library()
    if library is None or q.device.type != "cpu" or q.dtype not in native.TYPES:
        return apply_rotary_reference(q, k, cos, sin, inplace=inplace)
    q_out, k_out = (q, k) if inplace else (torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype))
    library.rotary(
        native.ROTARY.pack(
            q.data_ptr(), k.data_ptr(), 0, cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), 0, 0,
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], cos.shape[1],
            q.stride(0), k.stride(0), 0, q_out.stride(0), k_out.stride(0),
            native.TYPES[q.dtype], native.TYPES[cos.dtype],
        )
    )  # fmt: skip
    return q_out, k_out


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    """The rotated q, dense [tokens, heads, dim]. Stores the rotated k and v in their slots; slot -1 is skipped."""
    if _checked.is_new(q, k, v, cos, sin, cache.k, slot_mapping):
        _check_rotary(q, k, cos, sin)
        check_store(k, v, cache, slot_mapping)
        _checked.add(q, k, v, cos, sin, cache.k, slot_mapping)
    if takes_triton(q):
        q_out = q.new_empty(q.shape)
        launch_rotary(q, k, v, cos, sin, q_out, None, cache, slot_mapping)
        return q_out
    library = native.library()
    if library is None or not serves_store(cache, q.dtype):
        return rotary_and_store_reference(q, k, v, cos, sin, cache, slot_mapping)
    q_out = torch.empty(q.shape, dtype=q.dtype)
    tokens, heads, dim = q.shape
    library.rotary(
        native.ROTARY.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), 0,
            cache.pointer, slot_mapping.data_ptr(), tokens, heads, k.shape[1], dim, cos.shape[1],
            q.stride(0), k.stride(0), v.stride(0), heads * dim, 0,
            native.TYPES[q.dtype], native.TYPES[cos.dtype],
        )
    )  # fmt: skip
    return q_out


def _check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check_rotary_input("q", q, cos, sin)
    _check_rotary_input("k", k, cos, sin)
    check_shape("k", k, (q.shape[0], None, q.shape[2]))
    check_dtype("k", k, q.dtype)


def _check_rotary_input(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 3:
        refuse(name, "shape [tokens, heads, dim]", list(x.shape))
    check_dtype(name, x, *FLOATS)
    check_heads(name, x)
    rot_dim = cos.shape[-1]
    if rot_dim % 2 or rot_dim > x.shape[2]:
        refuse("cos", f"an even rot_dim of at most {name}'s dim {x.shape[2]}", rot_dim)
    check_shape("cos", cos, (x.shape[0], rot_dim))
    check_shape("sin", sin, (x.shape[0], rot_dim))
    check_dtype("cos", cos, x.dtype, torch.float32)
    check_dtype("sin", sin, cos.dtype)
    for label, table in (("cos", cos), ("sin", sin)):
        check_contiguous(label, table)
        check_device(label, table, x.device)


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rot_dim = cos.shape[-1]
    wide = x[..., :rot_dim].float()
    x1, x2 = wide.chunk(2, dim=-1)
    rotated = wide * cos.float()[:, None] + torch.cat((-x2, x1), dim=-1) * sin.float()[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rot_dim:]), dim=-1)


def apply_rotary_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    rotated = _rotate_reference(q, cos, sin), _rotate_reference(k, cos, sin)
    if inplace:
        return q.copy_(rotated[0]), k.copy_(rotated[1])
    return rotated


def rotary_and_store_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    store_kv_reference(_rotate_reference(k, cos, sin), v, cache, slot_mapping)
    return _rotate_reference(q, cos, sin)
