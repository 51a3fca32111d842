"""Graph: torch.cuda.CUDAGraph as a list of calls, over the memory that they had when they were captured.

A replay runs no Python but those calls: what was a number then is that number still. What the graph allocated is filled
with rubbish first, as others may have used it; what it did not allocate must still be there. Operators it does not
know.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.simulated_gpu.memory import Hazard, Memory
from tests.simulated_gpu.streams import Stream

if TYPE_CHECKING:
    from tests.simulated_gpu.gpu import SimulatedGpu

RUBBISH = 0xAB


class Graph:
    gpu: SimulatedGpu

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._own: dict[int, tuple[Memory, Tensor]] = {}
        self._others: dict[int, weakref.ref[Memory]] = {}

    def allocated(self, memory: Memory, held: Tensor) -> None:
        """By a call that is being captured."""
        self._own[id(memory)] = (memory, held)

    def add(self, call: Callable[[], None], used: list[Memory]) -> None:
        self._calls.append(call)
        self._others |= {id(memory): weakref.ref(memory) for memory in used if id(memory) not in self._own}

    def replay(self) -> None:
        if any(memory() is None for memory in self._others.values()):
            raise Hazard("a graph uses memory that has been freed since it was captured")
        for _, held in self._own.values():
            spoil(held)
        for call in self._calls:
            call()


class Capture:
    """torch.cuda.graph."""

    gpu: SimulatedGpu

    def __init__(
        self, graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._on = graph, self.gpu.on(stream or Stream())

    def __enter__(self) -> None:
        self.gpu.wait_for_all()
        self._on.__enter__()
        self.gpu.capturing = self._graph

    def __exit__(self, *raised: Any) -> None:
        self.gpu.capturing = None
        self._on.__exit__(*raised)


def spoil(held: Tensor) -> None:
    """Rubbish in all of a tensor's elements."""
    if held.numel():
        held.copy_(torch.full((held.nbytes,), RUBBISH, dtype=torch.uint8).view(held.dtype).view(held.shape))
