"""Memory: one allocation on the simulated GPU, and whether who touches it may.

Each stream counts what it runs, and knows of every other stream up to which of its counts it has waited. A read must
come behind the last write of every other stream, a write behind their last reads too: that is what no GPU checks. Of
an allocation that is watched this is kept for every 16 bytes, of others as a whole. It does not know operators.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GRANULE = 16
Clock = Counter[int]  # of each stream, up to where
Places = NDArray[np.int64]


class Hazard(Exception):
    """What a real GPU would not refuse, and might get wrong."""


class Memory:
    """Of `held`'s storage; `granules` of it are told apart."""

    def __init__(self, held: Tensor) -> None:
        storage = held.untyped_storage()
        self.first, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.watched, self._idle = False, 0
        self._granules = 1
        self._written: dict[int, NDArray[np.int64]] = {}  # by stream, when last
        self._read: dict[int, NDArray[np.int64]] = {}

    def watch(self, idle_bytes: int) -> None:
        """From now on by granules. So many bytes kernels may read at any time, as they make nothing of them."""
        self.watched, self._idle, self._granules = True, idle_bytes // _GRANULE, -(-self.nbytes // _GRANULE)
        self._written, self._read = {}, {}

    def touch(self, stream: int, clock: Clock, *, write: bool, what: str, places: Places | None = None) -> None:
        """Raises Hazard where it is not known to come behind all that it must. `places`: granules, all if None."""
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
        """Those that have touched it."""
        return {*self._written, *self._read}

    def places_of(self, held: Tensor) -> Places | None:
        """The granules of a view of it."""
        if not self.watched:
            return None
        count = self.nbytes // held.itemsize
        elements = torch.arange(count).as_strided(held.shape, held.stride(), held.storage_offset()).reshape(-1)
        return np.unique(elements.numpy() * held.itemsize // _GRANULE)

    def places_at(self, addresses: NDArray[np.uint64], *, write: bool) -> Places:
        """The granules that these addresses of a kernel lie in; none for those of other memory."""
        inside = addresses[(addresses >= self.first) & (addresses < self.first + self.nbytes)]
        places = np.unique((inside - np.uint64(self.first)) // np.uint64(_GRANULE)).astype(np.int64)
        return places if write else places[places >= self._idle]
