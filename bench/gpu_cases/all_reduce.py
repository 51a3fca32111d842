"""All-reduces through peer memory for bench/gpu.py: equal sums, and times beside NCCL.

With two or more GPUs, groups of 2, 4 and 8 of them; each rank is a process with a GPU of its own. With one GPU two
ranks share it, which torch allows for tests: then the sums count, and no time, because the GPU runs one rank at a time.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from coatcheck.bench.gpu_cases.clock import Roofs, seconds
from coatcheck.bench.gpu_cases.rank_processes import run_rank_processes
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.bench.setup.staged_communicator import StagedCommunicator
from coatcheck.kernels.layers.all_reduce_norm import all_reduce_add_norm
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.workers.distributed.communicator import Communicator

_HIDDEN = 8192
_TOKENS = (1, 16, 64, 512)  # 16 KiB to 8 MiB in bfloat16
_TARGET = 1.3  # times as fast as NCCL at 64 tokens or fewer
_TOLERANCE = 0.02


def all_reduce(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """One row for each group, size and form."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if gpus == 0:
        yield Measurement("all_reduce", "all-reduces through peer memory", note="not run: it needs a GPU")
    for size in [size for size in (2, 4, 8) if size <= gpus] or [2] * (gpus == 1):
        yield from _run_group(size, is_shared=gpus == 1)


def _run_group(size: int, *, is_shared: bool) -> Iterator[Measurement]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [["--as-peer", f"{rank},{size},{address},{int(is_shared)}"] for rank in range(size)]
    overlap = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if is_shared else {}
    for row in json.loads(run_rank_processes(words, {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **overlap})):
        yield Measurement("all_reduce", **row)


def as_peer(words: str) -> None:
    """Run one rank; rank 0 prints the rows. `words`: rank,size,address,whether the ranks share one GPU."""
    rank, size, address, shares = words.split(",")
    is_shared = bool(int(shares))
    device = torch.device("cuda", 0 if is_shared else int(rank))
    torch.cuda.set_device(device)
    if is_shared:
        staged = StagedCommunicator.join_staged(int(rank), int(size), address)
        staged.map_peer_memory(device)
        communicator: Communicator = staged
    else:
        communicator = Communicator.join(int(rank), int(size), address, device=device)
    with torch.inference_mode():
        rows = [row for tokens in _TOKENS for row in _measure(communicator, device, tokens, is_shared=is_shared)]
    if communicator.rank == 0:
        print(json.dumps(rows))
    communicator.barrier()
    communicator.close()


def _measure(
    communicator: Communicator, device: torch.device, tokens: int, *, is_shared: bool
) -> Iterator[dict[str, object]]:
    def random(seed: int) -> Tensor:
        made = torch.randn(tokens, _HIDDEN, generator=torch.Generator().manual_seed(seed))
        return made.to(device, torch.bfloat16)

    size = communicator.size
    parts = [random(seed) for seed in range(size)]
    want = torch.stack([part.float() for part in parts]).sum(0)
    mine, residual = parts[communicator.rank], random(size)
    symmetric = communicator._symmetric
    if symmetric is None:
        yield {"what": f"{size} ranks cannot map each other's memory", "failure": "the log above says why"}
        return
    place = "one GPU" if is_shared else f"{size} GPUs"
    title = f"{tokens * _HIDDEN * 2 >> 10} KiB over {place}"
    error = _error(communicator.all_reduce(mine.clone()), want)
    again = [communicator.all_reduce(mine.clone()) for _ in range(3)]
    is_stable = all(torch.equal(one, again[0]) for one in again)
    row = {"what": f"{symmetric.choose(mine)}, {title}", "error": error, "note": "" if is_stable else "bits change"}
    met = error <= _TOLERANCE and is_stable
    x = torch.zeros_like(mine)  # sums of zeros stay zero, however often they are added
    yield row | _beside_nccl(
        partial(communicator.all_reduce, x), partial(dist.all_reduce, x), device, met, tokens, is_shared
    )
    if (peers := communicator.peer_memory_for(mine)) is None:
        return
    norm = RmsNorm(torch.ones(_HIDDEN, dtype=torch.bfloat16, device=device), 1e-6)
    have = all_reduce_add_norm(mine, residual, norm, peers)
    error = max(map(_error, have, norm.add_and_norm(want.bfloat16(), residual)))
    row = {"what": f"one-shot with add and RMS norm, {title}", "error": error}

    def separate() -> None:
        dist.all_reduce(x)
        norm.add_and_norm(x, residual)

    work = partial(all_reduce_add_norm, x, residual, norm, peers)
    yield row | _beside_nccl(work, separate, device, error <= _TOLERANCE, tokens, is_shared)


def _beside_nccl(
    work: Callable[[], object],
    nccl: Callable[[], object],
    device: torch.device,
    is_right: bool,
    tokens: int,
    is_shared: bool,
) -> dict[str, object]:
    """The times in a CUDA graph of both, and whether the target is met."""
    if is_shared:
        return {"target": f"error <= {_TOLERANCE}", "met": is_right}
    ours, theirs = seconds(work, device, times=20) * 1e3, seconds(nccl, device, times=20) * 1e3
    target = f"{_TARGET} times as fast" if tokens <= 64 else "as fast"
    met = is_right and theirs >= ours * (_TARGET if tokens <= 64 else 1.0)
    return {"ms": ours, "beside": "NCCL", "beside_ms": theirs, "target": target, "met": met}


def _error(have: Tensor, want: Tensor) -> float:
    return float((have.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9))
