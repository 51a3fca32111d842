"""k_cache[slot // B, h, slot % B] = k[t, h] and the same for v, where slot = slot_mapping[t]; slot -1 is skipped.

Shapes: k, v [tokens, kv_heads, head_dim] (each token's heads dense; the stride over tokens is free, so slices of a
fused projection serve), k_cache, v_cache [num_blocks, kv_heads, B, head_dim] (inner three dense), slot_mapping int64
[tokens]. One program copies one token's heads. The file does not know which sequence a slot belongs to; two tokens
with the same slot are the caller's error.
"""

# Device functions are a language of their own inside Python: their arguments are pointers and constants, not objects.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from . import native
from .launch_check import FLOATS, refuse, want_cache, want_contiguous, want_device, want_dtype, want_heads, want_shape


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
    tl.store(k_cache + slot // SIZE * k_block + inside, tl.load(k + token * k_stride + at, mask), mask)
    tl.store(v_cache + slot // SIZE * v_block + inside, tl.load(v + token * v_stride + at, mask), mask)


def launch_store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    block = min(1024, triton.next_power_of_2(heads * dim))
    _store_kv[(tokens, -(-heads * dim // block))](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0),
        HEADS=heads, DIM=dim, SIZE=k_cache.shape[2], BLOCK=block, num_warps=4,
    )  # fmt: skip


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    check_store(k, v, k_cache, v_cache, slot_mapping)
    if k.device.type == "cuda":
        return launch_store_kv(k, v, k_cache, v_cache, slot_mapping)
    library = native.library()
    if library is None or k.device.type != "cpu" or k.dtype not in native.TYPES:
        return store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
    tokens, kv_heads, dim = k.shape
    kind = native.TYPES[k.dtype]
    library.rotary(
        native.ROTARY.pack(
            0, k.data_ptr(), v.data_ptr(), 0, 0, 0, 0, k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(),
            tokens, 0, kv_heads, dim, 0, 0, k.stride(0), v.stride(0), 0, 0,
            k_cache.stride(0), v_cache.stride(0), k_cache.shape[2], kind, kind,
        )
    )  # fmt: skip


def check_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Also `rotary_and_store`'s check: the two write the same caches."""
    want_cache("k_cache", k_cache)
    want_dtype("k_cache", k_cache, *FLOATS)
    want_shape("v_cache", v_cache, tuple(k_cache.shape))
    want_cache("v_cache", v_cache)
    want_dtype("v_cache", v_cache, k_cache.dtype)
    if k.dim() != 3:
        refuse("k", "shape [tokens, kv_heads, head_dim]", list(k.shape))
    tokens = k.shape[0]
    want_shape("k", k, (tokens, k_cache.shape[1], k_cache.shape[3]))
    want_shape("v", v, tuple(k.shape))
    want_dtype("k", k, k_cache.dtype)
    want_dtype("v", v, k_cache.dtype)
    want_heads("k", k)
    want_heads("v", v)
    want_shape("slot_mapping", slot_mapping, (tokens,))
    want_dtype("slot_mapping", slot_mapping, torch.int64)
    want_contiguous("slot_mapping", slot_mapping)
    for name, tensor in (("k", k), ("v", v), ("v_cache", v_cache), ("slot_mapping", slot_mapping)):
        want_device(name, tensor, k_cache.device)


def store_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k[kept]
    v_cache[blocks, :, offsets] = v[kept]
