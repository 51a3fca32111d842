"""KVCache: one layer's part of the KV pool, as all kernels read it. The constructor checks its tensors once.

Shapes: k, v [num_blocks, num_kv_heads, block_size, head_dim]; the inner three dimensions are contiguous, the stride
over blocks is free. Their dtype is float32, bfloat16 or float16; or, quantised as in quantise.py, float8_e4m3fn, int8
or uint8 (int4, head_dim / 2 bytes). Quantised pools have k_scales, v_scales float16 [num_blocks, num_kv_heads,
block_size]; the inner two dimensions are contiguous.
"""

from __future__ import annotations

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.kv.quantise import KINDS, widen_reference
from coatcheck.kernels.launch_check import FLOATS, check_device, check_dtype, check_shape, refuse


class KVCache:
    """`packed`: the C struct KvCache. `pointer`: the address of a copy that lives as long as this object."""

    def __init__(self, k: Tensor, v: Tensor, k_scales: Tensor | None = None, v_scales: Tensor | None = None) -> None:
        check_layout("k_cache", k)
        check_dtype("k_cache", k, *FLOATS, *KINDS)
        check_shape("v_cache", v, tuple(k.shape))
        check_layout("v_cache", v)
        check_dtype("v_cache", v, k.dtype)
        check_device("v_cache", v, k.device)
        self.is_quantised = k.dtype in KINDS
        check_scales("k_scales", k_scales, k)
        check_scales("v_scales", v_scales, k)
        # Triton kernels read quantised elements as bytes.
        self.k_bytes, self.v_bytes = (x.view(torch.uint8) if self.is_quantised else x for x in (k, v))
        self.k, self.v, self.k_scales, self.v_scales = k, v, k_scales, v_scales
        self.dtype, self.device = k.dtype, k.device
        _, self.kv_heads, self.block_size, width = k.shape
        self.head_dim = 2 * width if k.dtype == torch.uint8 else width
        self.bits = 4 if k.dtype == torch.uint8 else 8 * k.itemsize  # of an element
        self.packed = native.KV_CACHE.pack(
            k.data_ptr(), v.data_ptr(), k.stride(0) * k.itemsize, v.stride(0) * v.itemsize,
            0 if k_scales is None else k_scales.data_ptr(), 0 if v_scales is None else v_scales.data_ptr(),
            self.scales_stride(0), self.scales_stride(1),
            self.kv_heads, self.block_size, self.head_dim, width * k.itemsize, native.ELEMENTS[k.dtype],
        )  # fmt: skip
        self._packed_buffer = ctypes.create_string_buffer(self.packed)
        self.pointer = ctypes.addressof(self._packed_buffer)

    @cached_property
    def scale_words(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales of K and of V, two in each int32, as Triton kernels read them. Block sizes are even."""
        k, v = (None if scales is None else scales.view(torch.int32) for scales in (self.k_scales, self.v_scales))
        return k, v

    def scales_stride(self, which: int) -> int:
        """The stride over blocks of K's (`which` 0) or V's (1) scales; 0 without scales."""
        scales = self.v_scales if which else self.k_scales
        return 0 if scales is None else scales.stride(0)

    def rows_reference(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of `blocks`, in order: float32 [kv_heads, len(blocks) * block_size, head_dim]."""
        k, v = (
            # As bytes, because not every device can index float8.
            part[blocks].float()
            if scales is None
            else widen_reference(part.view(torch.uint8)[blocks].view(part.dtype), scales[blocks])
            for part, scales in ((self.k, self.k_scales), (self.v, self.v_scales))
        )
        return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def check_layout(name: str, part: Tensor) -> None:
    """Refuse anything but [blocks, kv_heads, block_size, dim] whose inner three dimensions are contiguous. The stride
    over blocks is free."""
    if part.dim() != 4:
        refuse(name, "4 dimensions [num_blocks, num_kv_heads, block_size, head_dim]", list(part.shape))
    _, heads, size, dim = part.shape
    if part.stride()[1:] != (size * dim, dim, 1) and heads * size * dim > 1:
        refuse(name, f"dense inner dimensions (strides (*, {size * dim}, {dim}, 1))", f"strides {part.stride()}")


def check_scales(name: str, scales: Tensor | None, part: Tensor) -> None:
    """Refuse anything but a float16 for each row of a quantised `part`, and None for other parts. The stride over
    blocks is free."""
    if scales is None:
        if part.dtype in KINDS:
            refuse(name, f"one float16 for each row of {part.dtype}", None)
        return
    if part.dtype not in KINDS:
        refuse(name, f"none beside {part.dtype}", list(scales.shape))
    _, heads, size, _ = part.shape
    check_shape(name, scales, tuple(part.shape[:3]))
    check_dtype(name, scales, torch.float16)
    check_device(name, scales, part.device)
    if scales.stride()[1:] != (size, 1) and heads * size > 1:
        refuse(name, f"dense [heads, block_size] (strides (*, {size}, 1))", f"strides {scales.stride()}")
