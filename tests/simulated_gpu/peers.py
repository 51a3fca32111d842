"""Simulated symmetric memory: torch.distributed._symmetric_memory between processes on one host without GPUs.

Each rank's buffer is a file that all ranks map. torch's operators of the namespace symm_mem, which only CUDA has, get
forms for CPU tensors here. They check what torch's kernels check, and add in the same order.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from tests.simulated_gpu.gpu import SimulatedGpu


class SimulatedPeers:
    """Patches this process. `calls`: the names of the operators that ran. `gpu`: None for tensors on the CPU."""

    def __init__(self, folder: Path, rank: int, size: int, gpu: SimulatedGpu | None, *, multicast: bool) -> None:
        self.calls: list[str] = []
        self._folder, self._rank, self._size, self._gpu = folder, rank, size, gpu
        self._multicast = multicast
        self._buffers: list[Tensor] = []
        patched: dict[str, Any] = {"get_backend": lambda device: "CUDA", "empty": self._empty}
        for name, replacement in (patched | {"rendezvous": self._rendezvous}).items():
            setattr(symm_mem, name, replacement)
        if gpu is None:
            torch.cuda.synchronize = lambda device=None: None
        self._library = torch.library.Library("symm_mem", "IMPL", "CPU")
        self._library.impl("one_shot_all_reduce_copy_out", self._one_shot)
        self._library.impl("two_shot_all_reduce_out", self._two_shot)
        self._library.impl("multimem_all_reduce_", self._multimem)

    def _empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        mine = self._mapped(self._rank, nbytes)
        mine.fill_(0xAB)
        return mine if self._gpu is None else self._gpu._wrapped(mine, [], [])

    def _mapped(self, rank: int, nbytes: int) -> Tensor:
        return torch.from_file(str(self._folder / f"rank-{rank}"), shared=True, size=nbytes, dtype=torch.uint8)

    def _rendezvous(self, buffer: Tensor, group: str) -> Any:
        assert group == dist.group.WORLD.group_name  # type: ignore[union-attr]
        _barrier()
        mapped = [self._mapped(rank, len(buffer)) for rank in range(self._size)]
        self._buffers = mapped
        addresses = [each.data_ptr() for each in mapped]
        addresses[self._rank] = buffer.data_ptr()
        return SimpleNamespace(buffer_ptrs=addresses, multicast_ptr=int(self._multicast))

    def _parts(self, symmetric: Tensor) -> list[Tensor]:
        """What lies at the place of `symmetric` in the buffer of each rank."""
        assert symmetric.is_contiguous() and symmetric.dtype in (torch.bfloat16, torch.float32)
        assert symmetric.nbytes % 4 == 0 and symmetric.storage_offset() * symmetric.itemsize % 16 == 0
        first = symmetric.storage_offset() * symmetric.itemsize
        return [each[first : first + symmetric.nbytes].view(symmetric.dtype) for each in self._buffers]

    def _sum(self, symmetric: Tensor) -> Tensor:
        _barrier()
        total, *others = (part.clone() for part in self._parts(symmetric))
        for part in others:
            total = total + part
        _barrier()
        return total

    def _one_shot(self, symmetric: Tensor, local: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        self.calls.append("one-shot")
        assert op == "sum" and out.shape == symmetric.shape == local.shape and local.is_contiguous()
        self._parts(symmetric)[self._rank].copy_(local)
        return out.copy_(self._sum(symmetric))

    def _two_shot(self, symmetric: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        self.calls.append("two-shot")
        assert op == "sum" and out.shape == symmetric.shape and self._size in (2, 4, 8)
        return out.copy_(self._sum(symmetric))

    def _multimem(self, symmetric: Tensor, op: str, group: str) -> Tensor:
        self.calls.append("multimem")
        assert op == "sum" and self._multicast
        return symmetric.copy_(self._sum(symmetric))


def _barrier() -> None:
    dist.all_reduce(torch.zeros(1))
