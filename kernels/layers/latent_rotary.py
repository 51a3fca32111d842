"""What latent attention (MLA) does before its scores: rotate queries and keys, normalise the latent, store both.

    q[t, h, nope:] = rotate(q[t, h, nope:])
    cache.latent[slot_mapping[t]] = cast(c / sqrt(mean(c ** 2) + eps)) * weight      c = kv[t, :rank]
    cache.rope_keys[slot_mapping[t]] = rotate(kv[t, rank:])                          slot -1 is skipped

`rotate` is the rotation of kernels/attention/rotary.py, which pairs elements i and i + rope_dim / 2. For an interleaved
embedding the loader reorders the rows of the weights.

Shapes: q_rope, out [tokens, heads, rope_dim], any strides over tokens and heads, and out may be q_rope; kv [tokens,
rank + rope_dim], any stride over tokens; cos, sin [tokens, rope_dim]; slot_mapping int64 [tokens] without repetition;
cache as latent_cache.py has it.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.rotary import _copy_heads, _rotate_heads, rotate_reference
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.latent_cache import LatentCache, store_latent_reference
from coatcheck.kernels.kv.quantise import KINDS
from coatcheck.kernels.kv.store_kv import NATIVE_MAX_DIM, _store_rows
from coatcheck.kernels.launch_check import (
    FLOATS,
    check_dense,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
    once_per_geometry,
    refuse,
)
from coatcheck.kernels.layers.rms_norm import RmsNorm


def rotate_and_store_latent(
    q_rope: Tensor,
    kv: Tensor,
    norm: RmsNorm,
    cos: Tensor,
    sin: Tensor,
    cache: LatentCache,
    slot_mapping: Tensor,
    out: Tensor,
) -> None:
    """Write the rotated parts of the queries to `out`, and the latents and rotary keys to `cache`.

    `norm`: the latent's norm, with offset 0. Raises LaunchRefused.
    """
    _check(q_rope, kv, norm.weight, cos, sin, slot_mapping, out, cache.rank, cache.rope_dim, cache.device)
    if uses_triton(kv):
        _launch(q_rope, kv, norm, cos, sin, cache, slot_mapping, out)
        return
    library = native.library_for(kv)
    if library is None or max(cache.rank, cache.rope_dim) > NATIVE_MAX_DIM:
        rotate_and_store_latent_reference(q_rope, kv, norm, cos, sin, cache, slot_mapping, out)
        return
    tokens, heads, _ = q_rope.shape
    library.latent_rotary(
        native.LATENT_ROTARY.pack(
            q_rope.data_ptr(), out.data_ptr(), kv.data_ptr(), norm.weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cache.pointer, slot_mapping.data_ptr(), tokens, heads, cache.rope_dim, cache.rope_row_bytes,
            q_rope.stride(0), q_rope.stride(1), out.stride(0), out.stride(1), kv.stride(0),
            native.TYPES[kv.dtype], native.TYPES[cos.dtype], norm.eps, 0.0,
        )
    )  # fmt: skip


@once_per_geometry
def _check(
    q_rope: Tensor, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, out: Tensor,
    rank: int, rope_dim: int, device: torch.device,
) -> None:  # fmt: skip
    check_dtype("kv", kv, *FLOATS)
    tokens = len(kv)
    check_shape("kv", kv, (tokens, rank + rope_dim))
    check_shape("q_rope", q_rope, (tokens, None, rope_dim))
    check_shape("out", out, tuple(q_rope.shape))
    check_dense("weight", weight, (rank,), kv.dtype, device)
    for name, tensor in (("kv", kv), ("q_rope", q_rope), ("out", out)):
        check_dtype(name, tensor, kv.dtype)
        check_device(name, tensor, device)
        check_rows(name, tensor)
    if rope_dim % 2:
        refuse("kv", "an even rope_dim, because rotary embeddings rotate pairs", rope_dim)
    check_dtype("cos", cos, kv.dtype, torch.float32)
    for name, table in (("cos", cos), ("sin", sin)):
        check_dense(name, table, (tokens, rope_dim), cos.dtype, device)
    check_dense("slot_mapping", slot_mapping, (tokens,), torch.int64, device)


_HEADS = 8  # heads that a program rotates


def _launch(
    q_rope: Tensor,
    kv: Tensor,
    norm: RmsNorm,
    cos: Tensor,
    sin: Tensor,
    cache: LatentCache,
    slot_mapping: Tensor,
    out: Tensor,
) -> None:
    tokens, heads, rope = q_rope.shape
    if tokens == 0:
        return
    latent = norm(kv[:, : cache.rank])
    _latent_rotary[(tokens, triton.cdiv(heads, _HEADS) + 1)](
        q_rope, out, latent, kv[:, cache.rank :], cos, sin, cache.latent_bytes, cache.rope_bytes, cache.latent_scales,
        cache.rope_scales, slot_mapping, q_rope.stride(0), q_rope.stride(1), out.stride(0), out.stride(1), kv.stride(0),
        cache.latent.stride(0), cache.rope_keys.stride(0), *cache.scales_strides,
        HEADS=heads, ROWS=_HEADS, RANK=cache.rank, ROPE=rope, SIZE=cache.block_size, KIND=KINDS.get(cache.dtype, 0),
        HALF=triton.next_power_of_2(rope // 2), BLOCK=triton.next_power_of_2(cache.rank),
        ROPE_BLOCK=triton.next_power_of_2(rope), num_warps=4,
    )  # fmt: skip


@triton.jit
def _latent_rotary(
    q, out, latent, rope_key, cos, sin, latents, rope_keys, latent_scales, rope_scales, slots,
    q_stride, q_head, out_stride, out_head, rope_stride, latent_block, rope_block, latent_scales_block,
    rope_scales_block, HEADS: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    SIZE: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program rotates ROWS heads of one token's query. The last program of a token stores its latent and key."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * ROPE
    sin += token * ROPE
    if tile < (HEADS + ROWS - 1) // ROWS:
        heads = tile * ROWS + tl.arange(0, ROWS)
        _rotate_heads(
            q + token * q_stride, q_head, out + token * out_stride, out_head, cos, sin, heads, heads < HEADS, ROPE,
            ROPE, HALF, ROPE_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            WIDTH: tl.constexpr = RANK // 2 if KIND == 3 else RANK
            ROPE_WIDTH: tl.constexpr = ROPE // 2 if KIND == 3 else ROPE
            block, row, one = slot // SIZE, slot % SIZE, tl.arange(0, 1)
            from_latent, from_rope = latent + token * RANK, rope_key + token * rope_stride
            to_latent = latents + block * latent_block + row * WIDTH
            to_rope = rope_keys + block * rope_block + row * ROPE_WIDTH
            if KIND > 0:
                PART: tl.constexpr = 2 if KIND == 3 else 1
                latent_scale = latent_scales + block * latent_scales_block + row
                rope_scale = rope_scales + block * rope_scales_block + row
                _store_rows(
                    from_latent, cos, sin, to_latent, latent_scale, one, one < 1, SIZE, 0, RANK, KIND, BLOCK // PART
                )
                _store_rows(
                    from_rope, cos, sin, to_rope, rope_scale, one, one < 1, SIZE, ROPE, ROPE, KIND, ROPE_BLOCK // PART
                )
            else:
                _copy_heads(from_latent, to_latent, 0, one, one < 1, 0, RANK, BLOCK)
                _rotate_heads(from_rope, 0, to_rope, 0, cos, sin, one, one < 1, ROPE, ROPE, HALF, ROPE_BLOCK)


def rotate_and_store_latent_reference(
    q_rope: Tensor,
    kv: Tensor,
    norm: RmsNorm,
    cos: Tensor,
    sin: Tensor,
    cache: LatentCache,
    slot_mapping: Tensor,
    out: Tensor,
) -> None:
    latent, rope_keys = kv.split_with_sizes((cache.rank, cache.rope_dim), dim=1)
    store_latent_reference(
        norm(latent.contiguous()), rotate_reference(rope_keys[:, None], cos, sin)[:, 0], cache, slot_mapping
    )
    out.copy_(rotate_reference(q_rope, cos, sin))
