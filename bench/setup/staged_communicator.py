"""StagedCommunicator: lets several ranks share one GPU, which NCCL refuses. Tensors go through host memory.

After `map_peer_memory`, all-reduces go through peer memory where a group without NCCL would use it. On one GPU torch
allows that only with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from typing import Self

import torch
from torch import Tensor

from coatcheck.workers.distributed.communicator import Communicator


class StagedCommunicator(Communicator):
    """Join with `join_staged`."""

    @classmethod
    def join_staged(
        cls, rank: int, size: int, address: str, *, share_memory: bool = True, timeout_seconds: float = 60.0
    ) -> Self:
        """Connect to the other ranks at rank 0's `address`, as ranks on CPUs do. `timeout_seconds`: of a collective."""
        return cls.join(
            rank, size, address, device=torch.device("cpu"), share_memory=share_memory, timeout_seconds=timeout_seconds
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._symmetric is not None and self._symmetric.all_reduce(x):
            return x
        return x.copy_(super().all_reduce(x.cpu()))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return super().all_gather(x.cpu(), dim).to(x.device)
