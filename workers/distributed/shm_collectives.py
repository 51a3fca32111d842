"""ShmCollectives: collectives between the CPU ranks of one host, through a mapped file in /dev/shm.

A layer needs two all-reduces, and gloo takes 0.5 to 2 ms for each between two processes. The protocol is in C
(kernels/csrc/shared_memory.c). This module checks that all ranks are on one host, creates the file, and turns the
results of the C functions into PeerLost.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.workers.core.runner_protocol import PeerLost

AllGather = Callable[[dict[str, Any]], list[dict[str, Any]]]

_DIRECTORY = Path("/dev/shm")
_CHUNK = 1 << 20  # bytes of a buffer; a larger tensor is exchanged in several chunks
_CACHE_LINE = 64  # bytes of a rank's counters
_MAX_RANKS = 64
# The C functions return 0, or one of these plus the rank that is late or dead.
_LATE, _DEAD = 1, 1 + _MAX_RANKS


class _Shared(ctypes.Structure):
    """The struct `Shared` of shared_memory.c."""

    _fields_ = (
        ("lines", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("pids", ctypes.c_int64 * _MAX_RANKS),
        ("call", ctypes.c_uint32),
    )


class ShmCollectives:
    """One rank's endpoint. Every rank makes the same calls in the same order, with the same shapes and dtypes.

    Every collective raises PeerLost if another rank has died, or is late by more than the timeout.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int], timeout_seconds: float) -> None:
        """`pids`: of all ranks, to detect a dead rank; 0 if the ranks do not share a PID namespace."""
        library = native.library()
        assert library is not None, "`connect` returns None without the library"
        self._library = library
        self._memory = memory  # referenced here because the addresses below point into it
        size = len(pids)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        padded = (ctypes.c_int64 * _MAX_RANKS)(*pids)
        timeout_ns = int(timeout_seconds * 1e9)
        self._shared = _Shared(base, base + size * _CACHE_LINE, rank, size, _CHUNK, timeout_ns, padded, 0)
        self._address = ctypes.addressof(self._shared)
        self._timeout_seconds = timeout_seconds

    @classmethod
    def connect(cls, rank: int, size: int, all_gather: AllGather, *, timeout_seconds: float) -> Self | None:
        """Map a new file on every rank. Returns None on every rank if one rank cannot map it.

        `all_gather(value)` returns every rank's value, in rank order.
        """
        memory = None
        path = _create_file(size) if rank == 0 and native.library() is not None and size <= _MAX_RANKS else ""
        try:
            peers = all_gather({"host": host_id(), "pid": os.getpid(), "namespace": _pid_namespace(), "path": path})
            path = peers[0]["path"]
            if path and native.library() is not None and all(peer["host"] == peers[0]["host"] for peer in peers):
                memory = _map_file(path, size)
            has_mapped = all_gather({"mapped": memory is not None})
        finally:
            if rank == 0 and path:
                os.unlink(path)  # the mappings remain, and the file cannot outlive the ranks
        if memory is None or not all(peer["mapped"] for peer in has_mapped):
            return None
        same_namespace = len({peer["namespace"] for peer in peers}) == 1
        pids = [peer["pid"] if same_namespace else 0 for peer in peers]
        return cls(memory, rank, pids, timeout_seconds)

    @staticmethod
    def can_reduce(x: Tensor) -> bool:
        """Whether `all_reduce` accepts a tensor of this device, dtype and layout."""
        return x.device.type == "cpu" and x.dtype in native.TYPES and x.is_contiguous()

    def all_reduce(self, x: Tensor) -> None:
        """Write the sum over ranks into `x`. It is added in float32, in rank order, and rounded once, so all ranks get
        the same bits."""
        self._check(self._library.shared_all_reduce(self._address, x.data_ptr(), x.numel(), native.TYPES[x.dtype]))

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors, [size, *x.shape]. `x`: a contiguous CPU tensor of any dtype."""
        out = torch.empty((self._shared.size, *x.shape), dtype=x.dtype)
        size = x.numel() * x.itemsize
        self._check(self._library.shared_all_gather(self._address, x.data_ptr(), size, out.data_ptr()))
        return out

    def broadcast(self, x: Tensor) -> None:
        """Write rank 0's `x` (contiguous, of one size on all ranks) into `x`. Rank 0 does not wait for the others."""
        self._check(self._library.shared_broadcast(self._address, x.data_ptr(), x.numel() * x.itemsize))

    def _check(self, result: int) -> None:
        if result >= _DEAD:
            raise PeerLost(f"rank {result - _DEAD} has died")
        if result >= _LATE:
            raise PeerLost(f"rank {result - _LATE} did not reach a collective within {self._timeout_seconds} s")


def _create_file(size: int) -> str:
    """The path of a new file of zeros with every page allocated. "" if /dev/shm, often 64 MB in a container, is
    full."""
    length = size * (_CACHE_LINE + 2 * _CHUNK)
    try:
        file, path = tempfile.mkstemp(prefix="coatcheck-", dir=_DIRECTORY)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, length)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


def _map_file(path: str, size: int) -> mmap.mmap | None:
    """The mapped file; None if it is not visible here, or if this process may have no more memory (`ulimit -v`)."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(file, size * (_CACHE_LINE + 2 * _CHUNK))
    except OSError:
        return None
    finally:
        os.close(file)


def host_id() -> str:
    """Equal in two processes if and only if they share /dev/shm. Containers of one host may have their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat(_DIRECTORY).st_dev}"
    except OSError:
        return f"{os.uname().nodename} has no shared memory"


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
