"""CUDA streams and events as vector clocks, which say what each stream has waited for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.simulated_gpu.memory import Clock, Hazard

if TYPE_CHECKING:
    from tests.simulated_gpu.gpu import SimulatedGpu


class Stream:
    """Replaces torch.cuda.Stream."""

    gpu: SimulatedGpu

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.number = len(self.gpu.streams)
        self.clock: Clock = Counter()
        self.gpu.streams.append(self)

    def tick(self) -> int:
        """Count an operator. It comes after everything that the host has waited for."""
        self.clock |= self.gpu.host
        self.clock[self.number] += 1
        return self.clock[self.number]

    def wait_stream(self, other: Stream) -> None:
        self._wait(other.clock)

    def wait_event(self, event: Event) -> None:
        self._wait(event.clock)

    def _wait(self, clock: Clock) -> None:
        if self.gpu.streams_wait:
            self.clock |= clock


class Event:
    """Replaces torch.cuda.Event."""

    gpu: SimulatedGpu

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self.clock = enable_timing, Clock()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current_stream()
        stream.tick()
        self.clock = Counter(stream.clock)

    def synchronize(self) -> None:
        if self.gpu.host_waits:
            self.gpu.wait(self.clock, "event")

    def elapsed_time(self, other: Event) -> float:
        """An invented number of milliseconds. Raises where CUDA does."""
        if not (self._timed and other._timed and self.clock and other.clock):
            raise RuntimeError("both events must be recorded, and for timing")
        if self.gpu.host_waits and not (self.clock <= self.gpu.host and other.clock <= self.gpu.host):
            raise Hazard("the time between two events that have not been waited for")
        return 0.01
