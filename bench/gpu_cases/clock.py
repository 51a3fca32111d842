"""Seconds of a piece of GPU work, and the roofs that they are held against.

The work is captured in a CUDA graph, several times over, so that launching it from Python is not measured; work
that cannot be captured is timed by events. On a CPU, which only tests the scripts, wall time is measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes a second of a large copy, read and written together, and operations a second of a large bf16 product."""

    copy: float
    matrix: float


def seconds(work: Work, device: torch.device, *, times: int = 5) -> float:
    """The median of several rounds; every round does the work `times` times."""
    if device.type != "cuda":
        work()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    repeated = _captured(work, times) or (lambda: [work() for _ in range(times)])
    repeated()
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


def measure_roofs(device: torch.device, *, quick: bool) -> Roofs:
    """Several GB, so that no cache helps; random numbers, since zeros draw less power."""
    elements = 1 << (20 if device.type == "cpu" else 30 if not quick else 28)
    one, other = torch.empty(2, elements, dtype=torch.bfloat16, device=device).normal_()
    copy = 2 * one.nbytes / seconds(partial(other.copy_, one), device, times=3)
    del one, other
    size = 256 if device.type == "cpu" else 8192
    a, b = torch.empty(2, size, size, dtype=torch.bfloat16, device=device).normal_()
    return Roofs(copy, 2 * size**3 / seconds(partial(torch.matmul, a, b), device))
