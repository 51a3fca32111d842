"""What this machine can do at most: how fast it reads memory, and how fast it multiplies bfloat16 matrices.

python bench/setup/roof.py [--threads 2]
"""

import time
from collections.abc import Callable

import torch
import typer


def read_bandwidth() -> float:
    """Bytes a second, the best of several passes over buffers that no cache holds."""
    one, other = torch.ones(64 << 20), torch.ones(64 << 20)
    passes: list[tuple[int, Callable[[], object]]] = [
        (one.nbytes, one.sum),
        (one.nbytes + other.nbytes, lambda: torch.dot(one, other)),
    ]
    return max(size / best_seconds(work, 6) for size, work in passes)


def matrix_throughput(dtype: torch.dtype = torch.bfloat16) -> float:
    """Floating-point operations a second of one large matrix product."""
    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b, 6)


def best_seconds(work: Callable[[], object], times: int) -> float:
    """The shortest of `times` runs, which other work on the machine disturbs least."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main(threads: int = 0) -> None:
    """Print what this machine can do at most; `threads` 0: torch's default."""
    if threads:
        torch.set_num_threads(threads)
    print(f"memory: {read_bandwidth() / 1e9:.1f} GB/s; bfloat16 matrices: {matrix_throughput() / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    typer.run(main)
