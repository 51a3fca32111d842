"""CPU tensors on huge pages, for weights and KV pools.

A step reads every weight once, so caches do not help. With pages of 4 KiB it also misses the TLB for each page. Linux
gives 2 MiB pages to private mappings that ask for them (MADV_HUGEPAGE). On other systems the pages have the usual size.
Small tensors share a mapping. A mapping is freed with its last tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_PAGE = 2 << 20  # bytes
_SHARED = 16 * _PAGE  # bytes of a mapping for small tensors: those of less than a quarter of it share one
_CACHE_LINE = 64
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it
_POPULATED_AT_ONCE = _PAGE  # bytes of a call, during which no other thread of the process can map memory
_PAUSE = 9  # the pause after a page, as a multiple of the time that it took: leaves most of a core to other threads


class _Mapping:
    """An anonymous mapping from which tensors are allocated front to back."""

    def __init__(self, size: int) -> None:
        # One page more than needed, because mappings are aligned to 4 KiB only. Private, because Linux has a setting of
        # its own for shared memory (shmem_enabled), which by default allows no huge pages.
        self._memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)  # keeps the mapping alive, as its slices do
        start = -whole.data_ptr() % _PAGE
        self._bytes = whole[start : start + size]
        self._used = 0

    def allocate(self, size: int) -> Tensor | None:
        """The next `size` bytes, aligned to a cache line, or None if they do not fit."""
        start, self._used = self._used, self._used + -(-size // _CACHE_LINE) * _CACHE_LINE
        return self._bytes[start : start + size] if self._used <= len(self._bytes) else None


_lock = threading.Lock()
_shared: _Mapping | None = None


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of zeros. Its memory comes from the kernel, so it is zero without being written."""
    global _shared
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if size >= _SHARED // 4:
        memory = _Mapping(-(-size // _PAGE) * _PAGE).allocate(size)
    else:
        with _lock:
            memory = None if _shared is None else _shared.allocate(size)
            if memory is None:
                _shared = _Mapping(_SHARED)
                memory = _shared.allocate(size)
    assert memory is not None, "a new mapping is large enough"
    return memory.view(dtype).view(shape)


def populate_in_background(tensor: Tensor) -> None:
    """Start a thread that allocates the pages of a CPU tensor of `zeros`. It uses about a tenth of a core.

    Other threads may read and write the tensor meanwhile; its values do not change. A page that the thread has not
    reached is allocated when it is first written, under load. A host that has overcommitted its memory kills the
    process then. Before Linux 5.14, and on other systems, every page is allocated at its first write.
    """
    if sys.platform == "linux" and tensor.nbytes:
        threading.Thread(target=_populate, args=(tensor,), name="populate", daemon=True).start()


def _populate(tensor: Tensor) -> None:
    # The thread keeps its usual priority, because during a call the kernel locks the process's memory map. A thread of
    # low priority that waits for a core on a busy host would hold that lock for seconds, and block the serving thread.
    advise = ctypes.CDLL(None).madvise
    start, end = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, tensor.data_ptr() + tensor.nbytes
    for address in range(start, end, _POPULATED_AT_ONCE):
        began = time.monotonic()
        size = min(_POPULATED_AT_ONCE, end - address)
        if advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
            return
        time.sleep(_PAUSE * (time.monotonic() - began))
