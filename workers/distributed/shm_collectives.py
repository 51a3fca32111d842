"""ShmCollectives: collectives between the ranks of one host, through memory that all of them map.

gloo's cost is a constant per call, 0.5 to 2 ms between two processes, and a layer needs two sums. The C side
(kernels/csrc/shared_memory.c) has the protocol; this file finds out whether all ranks share a host, makes the memory,
and says in words what went wrong. It does not know what is summed, and is no use between hosts or on GPUs.
"""

import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.workers.core.errors import PeerLost

Exchange = Callable[[bytes], list[bytes]]

_DIRECTORY = Path("/dev/shm")
_CHUNK = 1 << 20  # bytes of a buffer; larger tensors go in pieces
_LINE = 64
_MAX_RANKS = 64
_LATE, _GONE = 1, 1 + _MAX_RANKS


class _Shared(ctypes.Structure):
    """The C side's `Shared`."""

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
    """One rank's end. Every rank makes the same calls in the same order, with the same shapes and dtypes.

    Any of them raises PeerLost when a rank has died or does not come within the timeout.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: list[int], timeout_seconds: float) -> None:
        library = native.library()
        assert library is not None, "met only where the library is"
        self._library = library
        self._memory = memory  # kept: the addresses below point into it
        size = len(pids)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        padded = (ctypes.c_int64 * _MAX_RANKS)(*pids)
        timeout = int(timeout_seconds * 1e9)
        self._shared = _Shared(base, base + size * _LINE, rank, size, _CHUNK, timeout, padded, 0)
        self._address = ctypes.addressof(self._shared)
        self._timeout_seconds = timeout_seconds

    @classmethod
    def meet(cls, rank: int, size: int, exchange: Exchange, *, timeout_seconds: float) -> Self | None:
        """Every rank's end of new memory; None on every rank where they cannot share any.

        `exchange` hands each rank everybody's bytes, in rank order.
        """
        memory = None
        path = _create(size) if rank == 0 and native.library() is not None and size <= _MAX_RANKS else ""
        try:
            mine = {"host": _host(), "pid": os.getpid(), "namespace": _pid_namespace(), "path": path}
            facts = [json.loads(words) for words in exchange(json.dumps(mine).encode())]
            path = facts[0]["path"]
            if path and native.library() is not None and all(fact["host"] == facts[0]["host"] for fact in facts):
                memory = _map(path, size)
            everybody = all(words == b"mapped" for words in exchange(b"mapped" if memory else b"not mapped"))
        finally:
            if rank == 0 and path:
                os.unlink(path)  # mappings stay; nothing is left behind however the ranks end
        if not everybody or memory is None:
            return None
        same_namespace = len({fact["namespace"] for fact in facts}) == 1
        pids = [fact["pid"] if same_namespace else 0 for fact in facts]
        return cls(memory, rank, pids, timeout_seconds)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether `all_reduce` can add these up."""
        return x.device.type == "cpu" and x.dtype in native.TYPES and x.is_contiguous()

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum over ranks: added in rank order in float32 and rounded once, the same bits everywhere."""
        self._done(
            self._library.shared_all_reduce(self._address, x.data_ptr(), x.numel(), native.TYPES[x.dtype]),
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], of a contiguous CPU tensor of any dtype."""
        out = torch.empty((self._shared.size, *x.shape), dtype=x.dtype)
        size = x.numel() * x.itemsize
        self._done(self._library.shared_all_gather(self._address, x.data_ptr(), size, out.data_ptr()))
        return out

    def broadcast(self, x: Tensor) -> None:
        """x, contiguous and of the same size everywhere, becomes rank 0's; rank 0 does not wait for the others."""
        self._done(self._library.shared_broadcast(self._address, x.data_ptr(), x.numel() * x.itemsize))

    def _done(self, result: int) -> None:
        if result >= _GONE:
            raise PeerLost(f"rank {result - _GONE} has died")
        if result >= _LATE:
            raise PeerLost(f"rank {result - _LATE} did not come to a collective within {self._timeout_seconds} s")


def _create(size: int) -> str:
    """A new file of zeros whose every page is there; "" where there is no room: containers often have 64 MB."""
    length = size * (_LINE + 2 * _CHUNK)
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


def _map(path: str, size: int) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(file, size * (_LINE + 2 * _CHUNK))
    finally:
        os.close(file)


def _host() -> str:
    """The same for processes that may share memory, and for no others: containers of one host differ in /dev/shm."""
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
