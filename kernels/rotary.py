"""Rotary position embedding, half-rotation (NeoX) style, on the first rot_dim elements of each head.

    x1, x2 = x[:rot_dim/2], x[rot_dim/2:rot_dim]
    y = [x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[rot_dim:]]      (float32 inside, rounded once)

where cos1, cos2 are the halves of cos [tokens, rot_dim] (transformers gives both halves, equal). Shapes: q [tokens,
heads, dim], k [tokens, kv_heads, dim], each token's heads dense and the stride over tokens free; cos and sin dense, in
q's dtype or float32. `rotary_and_store` also puts the rotated k, and v, into the cache (see store_kv.py), quantised
where the cache is, so that k is never written twice. One program turns one head. The file does not know positions: cos
and sin say all.
"""

# Device functions are a language of their own inside Python: their arguments are pointers and constants, not objects.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from . import native
from .kv_cache import KVCache
from .launch_check import FLOATS, Passed, refuse, want_contiguous, want_device, want_dtype, want_heads, want_shape
from .quantise import KINDS
from .store_kv import _store_row, check_store, serves_store, store_kv_reference

_passed = Passed()


@triton.jit
def _turn_head(x, y, cos, sin, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One head: the two halves of the rotated part, then the rest as it is."""
    i = tl.arange(0, BLOCK)
    half = i < HALF
    a = tl.load(x + i, half, other=0.0).to(tl.float32)
    b = tl.load(x + HALF + i, half, other=0.0).to(tl.float32)
    cos_a, cos_b = tl.load(cos + i, half).to(tl.float32), tl.load(cos + HALF + i, half).to(tl.float32)
    sin_a, sin_b = tl.load(sin + i, half).to(tl.float32), tl.load(sin + HALF + i, half).to(tl.float32)
    rest = (i >= 2 * HALF) & (i < DIM)
    tail = tl.load(x + i, rest, other=0.0)
    tl.store(y + i, (a * cos_a - b * sin_a).to(x.dtype.element_ty).to(y.dtype.element_ty), half)
    tl.store(y + HALF + i, (b * cos_b + a * sin_b).to(x.dtype.element_ty).to(y.dtype.element_ty), half)
    tl.store(y + i, tail.to(y.dtype.element_ty), rest)


@triton.jit
def _rotary(
    q, k, v, cos, sin, q_out, k_out, k_cache, v_cache, k_scales, v_scales, slots,
    q_stride, k_stride, v_stride, q_out_stride, k_out_stride, k_block, v_block, k_scales_block, v_scales_block,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, SIZE: tl.constexpr,
    STORE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * ROT
    sin += token * ROT
    if head < HEADS:
        at = head * DIM
        _turn_head(q + token * q_stride + at, q_out + token * q_out_stride + at, cos, sin, ROT // 2, DIM, BLOCK)
    else:
        at = (head - HEADS) * DIM
        if STORE:
            slot = tl.load(slots + token)
            if slot >= 0:
                block, row = slot // SIZE, (head - HEADS) * SIZE + slot % SIZE
                head_k, head_v = k + token * k_stride + at, v + token * v_stride + at
                WIDTH: tl.constexpr = DIM // 2 if KIND == 3 else DIM
                to_k, to_v = k_cache + block * k_block + row * WIDTH, v_cache + block * v_block + row * WIDTH
                if KIND > 0:
                    HALF: tl.constexpr = BLOCK // 2 if KIND == 3 else BLOCK
                    _store_row(head_k, cos, sin, to_k, k_scales + block * k_scales_block + row, ROT, DIM, KIND, HALF)
                    _store_row(head_v, cos, sin, to_v, v_scales + block * v_scales_block + row, 0, DIM, KIND, HALF)
                else:
                    _turn_head(head_k, to_k, cos, sin, ROT // 2, DIM, BLOCK)
                    i = tl.arange(0, BLOCK)
                    tl.store(to_v + i, tl.load(head_v + i, i < DIM).to(v_cache.dtype.element_ty), i < DIM)
        else:
            _turn_head(k + token * k_stride + at, k_out + token * k_out_stride + at, cos, sin, ROT // 2, DIM, BLOCK)


def launch_rotary(
    q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor | None,
    cache: KVCache | None, slot_mapping: Tensor | None,
) -> None:  # fmt: skip
    """With a cache, k and v go to their slots; without, rotated k goes to k_out. One program turns one head."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    _rotary[(tokens, heads + k.shape[1])](
        q, k, v if v is not None else k, cos, sin, q_out, k_out if k_out is not None else q_out,
        cache.k_bytes if cache is not None else k, cache.v_bytes if cache is not None else k,
        cache.k_scales if cache is not None else None, cache.v_scales if cache is not None else None,
        slot_mapping if slot_mapping is not None else k,
        q.stride(0), k.stride(0), v.stride(0) if v is not None else 0, q_out.stride(0),
        k_out.stride(0) if k_out is not None else 0, cache.k.stride(0) if cache is not None else 0,
        cache.v.stride(0) if cache is not None else 0,
        cache.scales_stride(0) if cache is not None else 0, cache.scales_stride(1) if cache is not None else 0,
        HEADS=heads, DIM=dim, ROT=cos.shape[1], SIZE=cache.block_size if cache is not None else 1,
        STORE=cache is not None, KIND=KINDS.get(cache.dtype, 0) if cache is not None else 0,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """Returns rotated (q, k): dense copies, or with `inplace` the arguments themselves, overwritten."""
    _check_turn("q", q, cos, sin)
    _check_turn("k", k, cos, sin)
    if q.device.type == "cuda":
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
    """Returns rotated q, dense [tokens, heads, dim]; rotated k and v go into their slots. Slot -1 is skipped."""
    if _passed.is_new(q, k, v, cos, sin, cache.k, slot_mapping):
        _check_turn("q", q, cos, sin)
        _check_turn("k", k, cos, sin)
        check_store(k, v, cache, slot_mapping)
        _passed.add(q, k, v, cos, sin, cache.k, slot_mapping)
    if q.device.type == "cuda":
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


def _check_turn(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 3:
        refuse(name, "shape [tokens, heads, dim]", list(x.shape))
    want_dtype(name, x, *FLOATS)
    want_heads(name, x)
    rot_dim = cos.shape[-1]
    if rot_dim % 2 or rot_dim > x.shape[2]:
        refuse("cos", f"an even rot_dim of at most {name}'s dim {x.shape[2]}", rot_dim)
    want_shape("cos", cos, (x.shape[0], rot_dim))
    want_shape("sin", sin, (x.shape[0], rot_dim))
    want_dtype("cos", cos, x.dtype, torch.float32)
    want_dtype("sin", sin, cos.dtype)
    for label, table in (("cos", cos), ("sin", sin)):
        want_contiguous(label, table)
        want_device(label, table, x.device)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rot_dim = cos.shape[-1]
    wide = x[..., :rot_dim].float()
    x1, x2 = wide.chunk(2, dim=-1)
    rotated = wide * cos.float()[:, None] + torch.cat((-x2, x1), dim=-1) * sin.float()[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., rot_dim:]), dim=-1)


def apply_rotary_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    turned = _turn(q, cos, sin), _turn(k, cos, sin)
    if inplace:
        return q.copy_(turned[0]), k.copy_(turned[1])
    return turned


def rotary_and_store_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    store_kv_reference(_turn(k, cos, sin), v, cache, slot_mapping)
    return _turn(q, cos, sin)
