"""Pinned: host memory that the simulated GPU copies to and from while the host continues.

Until the host has waited for a copy, its target holds garbage, and its source must not change.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from tests.simulated_gpu.graph import fill_with_garbage
from tests.simulated_gpu.memory import Clock, Hazard


class _Copy(NamedTuple):
    stream: int
    time: int
    host: Tensor
    content: Tensor


class Pinned:
    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # bytes by address
        self._arriving: list[_Copy] = []
        self._leaving: list[_Copy] = []

    def add(self, address: int, nbytes: int) -> int:
        """Register a range. Returns CUDA's code for success."""
        self._ranges[address] = nbytes
        return 0

    def remove(self, address: int) -> None:
        del self._ranges[address]

    def pin(self, tensor: Tensor) -> Tensor:
        """Pin `tensor` for as long as it lives."""
        self.add(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(tensor, self._ranges.pop, tensor.data_ptr(), None)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(first <= tensor.data_ptr() < first + size for first, size in self._ranges.items())

    def start_download(self, stream: int, time: int, host: Tensor, content: Tensor) -> None:
        """Start a copy of `content` to `host`."""
        self._arriving.append(_Copy(stream, time, host, content))
        fill_with_garbage(host)

    def start_upload(self, stream: int, time: int, host: Tensor) -> None:
        """Start a copy from `host`."""
        if any(_overlap(host, copy.host) for copy in self._arriving):
            raise Hazard("a copy reads host memory that is still to be filled by another")
        self._leaving.append(_Copy(stream, time, host, host.clone()))

    def finish_copies(self, known: Clock) -> None:
        """Finish the copies before `known`, up to which the host has waited."""
        arriving, self._arriving = self._arriving, []
        for copy in arriving:
            if known[copy.stream] >= copy.time:
                copy.host.copy_(copy.content)
            else:
                self._arriving.append(copy)
        leaving, self._leaving = self._leaving, []
        for copy in leaving:
            if known[copy.stream] < copy.time:
                self._leaving.append(copy)
            elif not torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (copy.host, copy.content))):
                raise Hazard("pinned memory was changed before the copy that reads it was known to be over")


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
