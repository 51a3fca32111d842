"""StagedCommunicator: lets several ranks share one GPU, which NCCL refuses. Tensors go through host memory."""

from typing import Self

import torch
from torch import Tensor

from coatcheck.workers.distributed.communicator import Communicator


class StagedCommunicator(Communicator):
    """Join with `join_staged`."""

    @classmethod
    def join_staged(cls, rank: int, size: int, address: str, *, share_memory: bool = True) -> Self:
        """Connect to the other ranks at rank 0's `address`, as ranks on CPUs do."""
        return cls.join(rank, size, address, device=torch.device("cpu"), share_memory=share_memory)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(super().all_reduce(x.cpu()))

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return super().all_gather(x.cpu(), dim).to(x.device)
