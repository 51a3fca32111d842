"""What this machine can do at most: how fast it reads memory, and how fast it multiplies matrices.

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


def matrix_throughput() -> float:
    """Floating-point operations a second of one large matrix product, in the faster of bfloat16 and float32.

    A small product decides. On processors without AVX-512 torch multiplies bfloat16 without vectors, and a large
    product takes minutes.
    """
    rates = {dtype: _product_rate(256, dtype) for dtype in (torch.bfloat16, torch.float32)}
    return _product_rate(2048, max(rates, key=lambda dtype: rates[dtype]))


def _product_rate(size: int, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a [size, size] x [size, size] product."""
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
    print(f"memory: {read_bandwidth() / 1e9:.1f} GB/s; matrices: {matrix_throughput() / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    typer.run(main)
