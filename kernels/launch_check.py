"""Checks of a kernel's arguments: shapes, dtypes, strides and devices.

Every launcher checks its tensors before it touches memory, because a kernel that gets a wrong pointer corrupts other
requests' KV without an error. A refusal names the tensor, what was expected, and what was given.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

_MAX_GEOMETRIES = 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class LaunchRefused(ValueError):
    """A kernel cannot take a tensor. The message names the tensor and what to change."""


class CheckedGeometries:
    """The shapes, strides, dtypes and devices that one operation has checked. Checks read nothing else.

    On a CPU, a step of one token spends as long on checks as on a small kernel, and most calls repeat the same shapes.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def is_new(self, *tensors: Tensor | None) -> bool:
        """Whether tensors like these have not been checked together."""
        return _geometry(tensors) not in self._seen

    def add(self, *tensors: Tensor | None) -> None:
        if len(self._seen) >= _MAX_GEOMETRIES:
            self._seen.clear()
        self._seen.add(_geometry(tensors))


def _geometry(tensors: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def refuse(name: str, expected: str, got: object) -> NoReturn:
    raise LaunchRefused(f"{name}: expected {expected}, got {got}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """`None` in `shape` allows any size."""
    have = tensor.shape
    if len(have) != len(shape) or any(w is not None and w != h for w, h in zip(shape, have, strict=True)):
        refuse(name, f"shape [{', '.join('*' if w is None else str(w) for w in shape)}]", f"{list(have)}")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        refuse(name, f"dtype {' or '.join(str(d) for d in allowed)}", tensor.dtype)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        refuse(name, f"device {device}", tensor.device)


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        refuse(name, "a contiguous tensor", f"strides {tensor.stride()} for shape {list(tensor.shape)}")


def check_rows(name: str, tensor: Tensor) -> None:
    """The last dimension must be dense. Others may be strided, for example in a slice of a fused projection."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(name, "a last dimension with stride 1", f"strides {tensor.stride()}")


def check_heads(name: str, tensor: Tensor) -> None:
    """[tokens, heads, dim] with dense heads in each token. The stride over tokens is free."""
    _, heads, dim = tensor.shape
    _, per_head, per_element = tensor.stride()
    if (dim > 1 and per_element != 1) or (heads > 1 and per_head != dim):
        refuse(name, f"dense [heads, dim] per token (strides (*, {dim}, 1))", f"strides {tensor.stride()}")


def check_cache(name: str, cache: Tensor) -> None:
    """[blocks, kv_heads, block_size, dim] with the inner three dense. The stride over blocks is free."""
    if cache.dim() != 4:
        refuse(name, "4 dimensions [num_blocks, num_kv_heads, block_size, head_dim]", list(cache.shape))
    _, heads, size, dim = cache.shape
    if cache.stride()[1:] != (size * dim, dim, 1) and heads * size * dim > 1:
        refuse(name, f"dense inner dimensions (strides (*, {size * dim}, {dim}, 1))", f"strides {cache.stride()}")
