"""What a launcher says when it refuses its arguments.

Every launcher of this room checks shapes, dtypes, strides and devices before it touches memory, since a kernel that
is handed a wrong pointer corrupts someone else's cache in silence. The checks name the tensor, what was expected and
what came. This file knows tensors only; it does not know which operation asks.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

_MOST_GEOMETRIES = 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class LaunchRefused(ValueError):
    """A tensor was handed to a kernel that cannot take it; the message says which one and what to change."""


class Passed:
    """Geometries that one operation has checked and found good: the checks read nothing else, so once is enough.

    On a CPU a step of one token spends as long on checks as on a small kernel; most calls repeat one geometry.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def is_new(self, *tensors: Tensor | None) -> bool:
        """Whether these shapes, strides, dtypes and devices have not passed together yet."""
        return _geometry(tensors) not in self._seen

    def add(self, *tensors: Tensor | None) -> None:
        """They have passed."""
        if len(self._seen) >= _MOST_GEOMETRIES:
            self._seen.clear()
        self._seen.add(_geometry(tensors))


def _geometry(tensors: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def refuse(name: str, expected: str, got: object) -> NoReturn:
    raise LaunchRefused(f"{name}: expected {expected}, got {got}")


def want_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """`None` leaves a dimension free."""
    have = tensor.shape
    if len(have) != len(shape) or any(w is not None and w != h for w, h in zip(shape, have, strict=True)):
        refuse(name, f"shape [{', '.join('*' if w is None else str(w) for w in shape)}]", f"{list(have)}")


def want_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        refuse(name, f"dtype {' or '.join(str(d) for d in allowed)}", tensor.dtype)


def want_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        refuse(name, f"device {device}", tensor.device)


def want_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        refuse(name, "a contiguous tensor", f"strides {tensor.stride()} for shape {list(tensor.shape)}")


def want_rows(name: str, tensor: Tensor) -> None:
    """The last dimension must be dense; the others may be strided (a slice of a fused projection is fine)."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(name, "a last dimension with stride 1", f"strides {tensor.stride()}")


def want_heads(name: str, tensor: Tensor) -> None:
    """[tokens, heads, dim] with each token's heads dense; only the stride over tokens is free."""
    _, heads, dim = tensor.shape
    _, per_head, per_element = tensor.stride()
    if (dim > 1 and per_element != 1) or (heads > 1 and per_head != dim):
        refuse(name, f"dense [heads, dim] per token (strides (*, {dim}, 1))", f"strides {tensor.stride()}")


def want_cache(name: str, cache: Tensor) -> None:
    """[blocks, kv_heads, block_size, dim] with the inner three dense; blocks may lie far apart in the pool."""
    if cache.dim() != 4:
        refuse(name, "4 dimensions [num_blocks, num_kv_heads, block_size, head_dim]", list(cache.shape))
    _, heads, size, dim = cache.shape
    if cache.stride()[1:] != (size * dim, dim, 1) and heads * size * dim > 1:
        refuse(name, f"dense inner dimensions (strides (*, {size * dim}, {dim}, 1))", f"strides {cache.stride()}")
