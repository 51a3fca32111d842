"""Graph: torch.cuda.CUDAGraph as a list of calls on the memory that they used during the capture.

A replay runs only these calls, with the numbers of the capture. The graph's own memory is filled with garbage first,
because other graphs may have used it. Other memory must not have been freed since.
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

GARBAGE = 0xAB


class Graph:
    gpu: SimulatedGpu

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._own: dict[int, tuple[Memory, Tensor]] = {}
        self._others: dict[int, weakref.ref[Memory]] = {}

    def add_allocation(self, memory: Memory, held: Tensor) -> None:
        """Record memory that a captured call allocated."""
        self._own[id(memory)] = (memory, held)

    @property
    def nbytes(self) -> int:
        """Bytes that the captured calls allocated."""
        return sum(memory.nbytes for memory, _ in self._own.values())

    def add(self, call: Callable[[], None], used: list[Memory]) -> None:
        self._calls.append(call)
        self._others |= {id(memory): weakref.ref(memory) for memory in used if id(memory) not in self._own}

    def replay(self) -> None:
        if any(memory() is None for memory in self._others.values()):
            raise Hazard("a graph uses memory that has been freed since it was captured")
        self.gpu.launches["replay"] += 1
        for _, held in self._own.values():
            fill_with_garbage(held)
        for call in self._calls:
            call()


class Capture:
    """Replaces torch.cuda.graph."""

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


def fill_with_garbage(held: Tensor) -> None:
    """Fill a tensor with garbage."""
    if held.numel():
        held.copy_(torch.full((held.nbytes,), GARBAGE, dtype=torch.uint8).view(held.dtype).view(held.shape))
