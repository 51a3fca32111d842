"""Rotary position embedding, half-rotation (NeoX) style, on the first rot_dim elements of each head.

    x1, x2 = x[:rot_dim/2], x[rot_dim/2:rot_dim]
    y = [x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[rot_dim:]]      (float32 inside, rounded once)

where cos1, cos2 are the halves of cos [tokens, rot_dim] (transformers gives both halves, equal). Shapes: q [tokens,
heads, dim], k [tokens, kv_heads, dim], each token's heads dense and the stride over tokens free; cos and sin dense, in
q's dtype or float32. `rotary_and_store` also puts the rotated k, and v, into the cache (see store_kv.py for its shapes)
so that k is never written twice. One program turns one token. The file does not know positions: cos and sin say all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .launch_check import FLOATS, refuse, want_contiguous, want_device, want_dtype, want_heads, want_shape
from .store_kv import check_store, store_kv_reference


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inplace: bool = False) -> tuple[Tensor, Tensor]:
    """Returns rotated (q, k): dense copies, or with `inplace` the arguments themselves, overwritten."""
    _check_turn("q", q, cos, sin)
    _check_turn("k", k, cos, sin)
    library = native.library()
    if library is None or q.device.type != "cpu" or q.dtype not in native.TYPES:
        return apply_rotary_reference(q, k, cos, sin, inplace=inplace)
    q_out, k_out = (q, k) if inplace else (torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype))
    library.rotary(
        native.ROTARY.pack(
            q.data_ptr(), k.data_ptr(), 0, cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), 0, 0, 0,
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], cos.shape[1],
            q.stride(0), k.stride(0), 0, q_out.stride(0), k_out.stride(0), 0, 0, 1,
            native.TYPES[q.dtype], native.TYPES[cos.dtype],
        )
    )  # fmt: skip
    return q_out, k_out


def rotary_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """Returns rotated q, dense [tokens, heads, dim]; rotated k and v go into their slots. Slot -1 is skipped."""
    _check_turn("q", q, cos, sin)
    _check_turn("k", k, cos, sin)
    check_store(k, v, k_cache, v_cache, slot_mapping)
    library = native.library()
    if library is None or q.device.type != "cpu" or q.dtype not in native.TYPES:
        return rotary_and_store_reference(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    q_out = torch.empty(q.shape, dtype=q.dtype)
    tokens, heads, dim = q.shape
    library.rotary(
        native.ROTARY.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), 0,
            k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(),
            tokens, heads, k.shape[1], dim, cos.shape[1],
            q.stride(0), k.stride(0), v.stride(0), heads * dim, 0,
            k_cache.stride(0), v_cache.stride(0), k_cache.shape[2],
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
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    store_kv_reference(_turn(k, cos, sin), v, k_cache, v_cache, slot_mapping)
    return _turn(q, cos, sin)
