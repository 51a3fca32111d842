"""Checks of a kernel's arguments: shapes, dtypes, strides and devices.

Every operation checks its tensors before it touches memory, because a kernel with a wrong pointer corrupts the KV of
other requests without an error. The error of a check names the tensor, what was expected, and what was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NoReturn, TypeVarTuple

import torch
from torch import Tensor

_MAX_GEOMETRIES = 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Arguments = TypeVarTuple("Arguments")


class LaunchRefused(ValueError):
    """A kernel cannot compute on a tensor. The message names the tensor, what was expected and what was given."""


def once_per_geometry(check: Callable[[*Arguments], None]) -> Callable[[*Arguments], None]:
    """Wrap `check` so that it runs only once for each geometry of its arguments.

    The geometry of a tensor is its shape, strides, dtype and device, so `check` may read nothing else of a tensor.
    Other arguments must be hashable. Most calls repeat the same geometries, and on a CPU a check takes as long as a
    small kernel of a step of one token.
    """
    seen: set[tuple[object, ...]] = set()

    @wraps(check)
    def check_if_new(*arguments: *Arguments) -> None:
        geometry = tuple([(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in arguments])
        if geometry not in seen:
            check(*arguments)
            if len(seen) >= _MAX_GEOMETRIES:
                seen.clear()
            seen.add(geometry)

    return check_if_new


def refuse(name: str, expected: str, got: object) -> NoReturn:
    raise LaunchRefused(f"{name}: expected {expected}, got {got}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse a tensor without this shape. `None` in `shape` allows any size."""
    have = tensor.shape
    if len(have) != len(shape) or any(w is not None and w != h for w, h in zip(shape, have, strict=True)):
        refuse(name, f"shape [{', '.join('*' if w is None else str(w) for w in shape)}]", f"{list(have)}")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        refuse(name, f"dtype {' or '.join(str(d) for d in allowed)}", tensor.dtype)


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        refuse(name, f"device {device}", tensor.device)


def check_dense(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a tensor that is not contiguous, or lacks this shape, dtype or device. `None` in `shape` allows any
    size."""
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtype)
    check_device(name, tensor, device)
    if not tensor.is_contiguous():
        refuse(name, "a contiguous tensor", f"strides {tensor.stride()} for shape {list(tensor.shape)}")


def check_rows(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous. Others may be strided, as in a slice of a fused
    projection."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(name, "a last dimension with stride 1", f"strides {tensor.stride()}")


def check_logits(logits: Tensor) -> None:
    """Refuse anything but float32 [rows, vocabulary]; rows may be strided."""
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, torch.float32)
    check_rows("logits", logits)


def check_heads(
    name: str, tensor: Tensor, shape: tuple[int | None, int | None, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse anything but [tokens, heads, dim] whose heads are contiguous in each token; the stride over tokens is
    free.
    `None` in `shape` allows any size."""
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtype)
    check_device(name, tensor, device)
    _, heads, dim = tensor.shape
    _, per_head, per_element = tensor.stride()
    if (dim > 1 and per_element != 1) or (heads > 1 and per_head != dim):
        refuse(name, f"dense [heads, dim] per token (strides (*, {dim}, 1))", f"strides {tensor.stride()}")
