"""Latent attention (MLA) before its scores: rotates queries and the rotary key, normalises the latent, stores both.

    q[t, h, nope:] = rotate(q[t, h, nope:])
    cache.latent[slot_mapping[t]] = cast(c / sqrt(mean(c ** 2) + eps)) * weight      c = kv[t, :rank]
    cache.rope_keys[slot_mapping[t]] = rotate(kv[t, rank:])                          slot -1 is skipped

`rotate` is that of kernels/attention/rotary.py, whose pairs lie half a head apart. For an interleaved embedding the
rows of the weights are reordered when they are loaded.

Shapes: q_rope, out [tokens, heads, rope_dim], any strides over tokens and heads, and out may be q_rope; kv [tokens,
rank + rope_dim], any stride over tokens; cos, sin [tokens, rope_dim]; slot_mapping int64 [tokens] without repetition;
cache as latent_cache.py has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.attention.rotary import rotate_reference
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.kv.latent_cache import LatentCache, store_latent_reference
from coatcheck.kernels.kv.store_kv import NATIVE_MAX_DIM
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
    """`norm`: of the latent, without an offset. `out` gets the rotated parts of the queries."""
    _check(q_rope, kv, norm.weight, cos, sin, slot_mapping, out, cache.rank, cache.rope_dim, cache.device)
    library = native.library_for(kv)
    if library is None or uses_triton(kv) or max(cache.rank, cache.rope_dim) > NATIVE_MAX_DIM:
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
