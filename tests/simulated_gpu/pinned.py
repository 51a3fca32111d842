"""Pinned: host memory that a GPU copies from and to while the host goes on.

What comes is rubbish until the host has waited for it; what goes must stay as it is until then. It does not know what
else the streams do.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from tests.simulated_gpu.graph import spoil
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
        """CUDA's code for success."""
        self._ranges[address] = nbytes
        return 0

    def remove(self, address: int) -> None:
        del self._ranges[address]

    def made(self, tensor: Tensor) -> Tensor:
        """A tensor that is pinned for as long as it lives."""
        self.add(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(tensor, self._ranges.pop, tensor.data_ptr(), None)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return any(first <= tensor.data_ptr() < first + size for first, size in self._ranges.items())

    def comes(self, stream: int, time: int, host: Tensor, content: Tensor) -> None:
        """A copy to the host, which has begun."""
        self._arriving.append(_Copy(stream, time, host, content))
        spoil(host)

    def goes(self, stream: int, time: int, host: Tensor) -> None:
        """A copy from the host, which has begun."""
        if any(_overlap(host, copy.host) for copy in self._arriving):
            raise Hazard("a copy reads host memory that is still to be filled by another")
        self._leaving.append(_Copy(stream, time, host, host.clone()))

    def settle(self, known: Clock) -> None:
        """So much the host knows to be over."""
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
