"""Memory: one allocation on the simulated GPU, with a race detector.

Each stream counts its operators, and has a vector clock: for every other stream, up to which count it has waited. A
read must come after the last write of every other stream, a write also after their last reads. A real GPU does not
check that. A watched allocation is checked per 16 bytes, others as a whole.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GRANULE = 16
Clock = Counter[int]  # by stream, a count of its operators
Places = NDArray[np.int64]


class Hazard(Exception):
    """A missing synchronisation, for which a real GPU might compute garbage."""


class CaptureError(RuntimeError):
    """What CUDA refuses while a graph is captured."""


class Memory:
    """The allocation of `held`'s storage."""

    def __init__(self, held: Tensor) -> None:
        storage = held.untyped_storage()
        self.first, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.watched, self._idle = False, 0
        self._granules = 1
        self._written: dict[int, NDArray[np.int64]] = {}  # by stream, when last
        self._read: dict[int, NDArray[np.int64]] = {}

    def watch(self, idle_bytes: int) -> None:
        """Check per granule from now on. The first `idle_bytes` may be read at any time: kernels ignore what they
        read there."""
        self.watched, self._idle, self._granules = True, idle_bytes // _GRANULE, -(-self.nbytes // _GRANULE)
        self._written, self._read = {}, {}

    def touch(self, stream: int, clock: Clock, *, write: bool, what: str, places: Places | None = None) -> None:
        """Record an access. Raise Hazard if `stream` did not wait for a conflicting one. `places`: granules, or all."""
        at = np.arange(self._granules) if places is None else places
        for table in (self._written, self._read) if write else (self._written,):
            for other, times in table.items():
                if other != stream and (late := times[at] > clock[other]).any():
                    ours, theirs = "writes" if write else "reads", "writes" if table is self._written else "reads"
                    raise Hazard(
                        f"{what} on stream {stream} {ours} {late.sum()} of {self._granules} places "
                        f"which stream {other} {theirs}, and has not waited for it"
                    )
        table = self._written if write else self._read
        table.setdefault(stream, np.zeros(self._granules, np.int64))[at] = clock[stream]

    def streams(self) -> set[int]:
        """The streams that accessed it."""
        return {stream for table in (self._written, self._read) for stream, times in table.items() if times.any()}

    def places_of(self, held: Tensor) -> Places | None:
        """The granules of a view; None if they are not told apart."""
        if not self.watched:
            return None
        count = self.nbytes // held.itemsize
        elements = torch.arange(count).as_strided(held.shape, held.stride(), held.storage_offset()).reshape(-1)
        return np.unique(elements.numpy() * held.itemsize // _GRANULE)

    def places_at(self, addresses: NDArray[np.uint64], *, write: bool) -> Places:
        """The granules at these addresses, which a kernel accesses; addresses in other memory are ignored."""
        inside = addresses[(addresses >= self.first) & (addresses < self.first + self.nbytes)]
        places = np.unique((inside - np.uint64(self.first)) // np.uint64(_GRANULE)).astype(np.int64)
        return places if write else places[places >= self._idle]
