"""LatentCache: one layer's part of the KV pool with latent attention (MLA). It has two rows per token, for all heads.

    latent       [num_blocks, 1, block_size, rank]        the keys without their rotated part, and the values
    rope_keys    [num_blocks, 1, block_size, rope_dim]    the rotated part of the keys

Dtypes, strides and scales are those of kv_cache.py. Each of the two rows has its own scale.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.kv.kv_cache import check_layout, check_scales
from coatcheck.kernels.kv.quantise import KINDS, quantise_reference, widen_reference
from coatcheck.kernels.launch_check import FLOATS, check_dense, check_device, check_dtype, check_shape


class LatentCache:
    """`rank`, `rope_dim`: elements of the two rows. `bits`: of an element. `pointer`: the address of the C struct
    KvCache."""

    def __init__(
        self,
        latent: Tensor,
        rope_keys: Tensor,
        latent_scales: Tensor | None = None,
        rope_scales: Tensor | None = None,
    ) -> None:
        check_layout("latent", latent)
        check_shape("latent", latent, (None, 1, None, None))
        check_dtype("latent", latent, *FLOATS, *KINDS)
        check_shape("rope_keys", rope_keys, (*latent.shape[:3], None))
        check_layout("rope_keys", rope_keys)
        check_dtype("rope_keys", rope_keys, latent.dtype)
        check_device("rope_keys", rope_keys, latent.device)
        check_scales("latent_scales", latent_scales, latent)
        check_scales("rope_scales", rope_scales, rope_keys)
        self.is_quantised = latent.dtype in KINDS
        self.latent, self.rope_keys = latent, rope_keys
        # Triton kernels read quantised elements as bytes.
        self.latent_bytes, self.rope_bytes = (
            part.view(torch.uint8) if self.is_quantised else part for part in (latent, rope_keys)
        )
        self.latent_scales, self.rope_scales = latent_scales, rope_scales
        self.dtype, self.device = latent.dtype, latent.device
        self.block_size = latent.shape[2]
        packing = 2 if latent.dtype == torch.uint8 else 1  # elements of a stored value
        self.rank, self.rope_dim = packing * latent.shape[3], packing * rope_keys.shape[3]
        self.bits = 4 if packing == 2 else 8 * latent.itemsize
        size = latent.itemsize
        self.rope_row_bytes = rope_keys.shape[3] * size
        # The C struct KvCache, with the rotary keys as its values.
        self.packed = native.KV_CACHE.pack(
            latent.data_ptr(), rope_keys.data_ptr(), latent.stride(0) * size, rope_keys.stride(0) * size,
            0 if latent_scales is None else latent_scales.data_ptr(),
            0 if rope_scales is None else rope_scales.data_ptr(),
            0 if latent_scales is None else latent_scales.stride(0),
            0 if rope_scales is None else rope_scales.stride(0),
            1, self.block_size, self.rank, latent.shape[3] * size, native.ELEMENTS[latent.dtype],
        )  # fmt: skip
        self._packed_buffer = ctypes.create_string_buffer(self.packed)
        self.pointer = ctypes.addressof(self._packed_buffer)

    @property
    def scales_strides(self) -> tuple[int, int]:
        """The strides over blocks of the scales of latents and of rotary keys; 0 without scales."""
        latent, rope = (0 if scales is None else scales.stride(0) for scales in (self.latent_scales, self.rope_scales))
        return latent, rope

    def rows(self, blocks: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys of `blocks`, in order: `dtype` [len(blocks) * block_size, rank or rope_dim]."""
        latent, rope_keys = (
            # As bytes, because not every device can index float8.
            part[blocks].to(dtype)
            if scales is None
            else widen_reference(part.view(torch.uint8)[blocks].view(part.dtype), scales[blocks]).to(dtype)
            for part, scales in ((self.latent, self.latent_scales), (self.rope_keys, self.rope_scales))
        )
        return latent.flatten(0, 2), rope_keys.flatten(0, 2)


def store_latent_reference(latent: Tensor, rope_keys: Tensor, cache: LatentCache, slot_mapping: Tensor) -> None:
    """Store row t of `latent` [tokens, rank] and of `rope_keys` [tokens, rope_dim] in slot slot_mapping[t]; slot -1 is
    skipped."""
    check_dense("slot_mapping", slot_mapping, (len(latent),), torch.int64, cache.device)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    parts = ((latent, cache.latent, cache.latent_scales), (rope_keys, cache.rope_keys, cache.rope_scales))
    for x, to, scales in parts:
        if scales is None:
            to[blocks, 0, offsets] = x[kept].to(to.dtype)
        else:
            rows, units = quantise_reference(x[kept], to.dtype)
            # As bytes, because not every device can store float8 by index.
            to.view(torch.uint8)[blocks, 0, offsets] = rows.view(torch.uint8)
            scales[blocks, 0, offsets] = units
