"""Memory for what a CPU reads from end to end at every step, on huge pages where the system gives them.

A step reads every weight once, in an order that the caches cannot help with; at 4 KiB a page it also walks the page
table for each of them. Linux hands out 2 MiB pages to mappings that ask (MADV_HUGEPAGE); elsewhere, and where it has
none to give, this is plain memory. Small tensors share a mapping; memory goes back to the system once no tensor of its
mapping is left. The file does not know what is kept in it.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_PAGE = 2 << 20
_SHARED = 16 * _PAGE  # smaller tensors than a quarter of this share mappings of this size
_LINE = 64


class _Mapping:
    """One anonymous mapping, given out from its start."""

    def __init__(self, size: int) -> None:
        # A page more than asked for: the kernel aligns mappings to 4 KiB only.
        self._memory = mmap.mmap(-1, size + _PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel that was built without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)  # it keeps the mapping alive, as its slices do
        start = -whole.data_ptr() % _PAGE
        self._bytes = whole[start : start + size]
        self._taken = 0

    def take(self, size: int) -> Tensor | None:
        """The next `size` bytes, on a cache line of their own; None where they do not fit."""
        start, self._taken = self._taken, self._taken + -(-size // _LINE) * _LINE
        return self._bytes[start : start + size] if self._taken <= len(self._bytes) else None


_lock = threading.Lock()
_shared: _Mapping | None = None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A dense CPU tensor; it reads as zeros, since fresh mappings do."""
    global _shared
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if size >= _SHARED // 4:
        memory = _Mapping(-(-size // _PAGE) * _PAGE).take(size)
    else:
        with _lock:
            memory = None if _shared is None else _shared.take(size)
            if memory is None:
                _shared = _Mapping(_SHARED)
                memory = _shared.take(size)
    assert memory is not None, "a new mapping is large enough"
    return memory.view(dtype).view(shape)
