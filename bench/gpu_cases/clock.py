"""Seconds of a piece of GPU work, and the roofs that they are held against.

The work is captured in a CUDA graph, several times over, so that launching it from Python is not measured; work
that cannot be captured is timed by events. On a CPU, which only tests the scripts, wall time is measured.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

Work = Callable[[], object]
# Seconds of work before times are taken: an idle GPU has a low clock, and needs some milliseconds to raise it.
_WARM_UP = 0.02
_ROOFS_WARM_UP = 0.5
_ROUNDS = 5  # of each roof, of which the fastest counts: a roof is what the device can do, not what it does on average
# Bytes. Works that are timed in turn read at least this much together, so that none finds its operands in the L2 cache
# (50 MB).
UNCACHED = 256 << 20


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes and operations a second, measured.

    `copy`: bytes of a large copy, read and written together. `read`: bytes of a large sum, which writes nothing.
    `matrix`: operations of a large bf16 product.
    """

    copy: float
    read: float
    matrix: float

    @property
    def memory(self) -> float:
        """Bytes a second that memory can deliver, by the faster of the two measurements."""
        return max(self.copy, self.read)

    def floor(self, moved: float, operations: float = 0, *, of_8_bits: bool = False) -> float:
        """The least seconds for moving this many bytes and for this many operations at the same time. Matrix units
        multiply operands of 8 bits twice as fast as bfloat16."""
        return max(moved / self.memory, operations / self.matrix / (2 if of_8_bits else 1))


def in_turn(works: Sequence[Work]) -> Work:
    """Each call does the next one of `works`, so that none finds its own operands in a cache."""
    turns = cycle(works)
    return lambda: next(turns)()


def seconds(work: Work, device: torch.device, *, times: int = 5) -> float:
    """The median of several rounds; every round does the work `times` times."""
    if device.type != "cuda":
        work()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    repeated = _captured(work, times) or (lambda: [work() for _ in range(times)])
    _warm_up(repeated, _WARM_UP)
    found: list[float] = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        repeated()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) / 1e3 / times)
    return statistics.median(found)


def _captured(work: Work, times: int) -> Work | None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # NCCL has a thread
            for _ in range(times):
                work()
    except RuntimeError:  # the work synchronises with the host
        torch.cuda.synchronize()
        return None
    return graph.replay


def _warm_up(work: Work, wanted: float) -> None:
    """Repeat the work, at least once, until `wanted` seconds have passed."""
    started = time.perf_counter()
    while True:
        work()
        torch.cuda.synchronize()
        if time.perf_counter() - started >= wanted:
            return


def measure_roofs(device: torch.device, *, quick: bool) -> Roofs:
    """Several GB, so that no cache helps; random numbers, since zeros draw less power. The clock has risen before the
    first of the rounds, and the fastest round counts."""
    elements = 1 << (19 if device.type == "cpu" else 29 if not quick else 27)
    size = 256 if device.type == "cpu" else 8192
    a, b = torch.empty(2, size, size, dtype=torch.bfloat16, device=device).normal_()
    multiply = partial(torch.matmul, a, b)
    if device.type == "cuda":
        _warm_up(multiply, _ROOFS_WARM_UP)
    matrix = 2 * size**3 / _fastest(multiply, device)
    del a, b, multiply
    one, other = torch.empty(2, elements, device=device).normal_()
    copy = 2 * one.nbytes / _fastest(partial(other.copy_, one), device)
    return Roofs(copy, one.nbytes / _fastest(one.sum, device), matrix)


def _fastest(work: Work, device: torch.device) -> float:
    return min(seconds(work, device, times=3) for _ in range(_ROUNDS))


def is_usable(device: torch.device) -> bool:
    """Whether calls on the device succeed. After a kernel's fault none does."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
