"""Copies KV blocks between a rank's pool and its host tier, checks them, and reports when all ranks are done.

    start_copies(plan)   ... the step is computed ...   report_copies() -> CopyReport

Every demoted block gets a checksum, which is verified when the block is restored. On a CPU the copies run on the rank's
threads, before the step: a CPU has no copy engine. On a GPU see cuda_block_copier.py.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from coatcheck.kernels.kv.transfer_blocks import transfer_blocks
from coatcheck.workers.core.runner_protocol import CopyReport, CopyStatus
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator

_NUM_MEASURED = 5  # plans whose copy time counts
_NANO = 1e9
Pairs = Sequence[tuple[int, int]]


@dataclass(slots=True, eq=False)
class BlockCopy:
    """The status of one block's copy."""

    status: CopyStatus = CopyStatus.IN_PROGRESS


class BlockCopier(ABC):
    """Copies one rank's blocks between `pool` and `host`, both uint8 [blocks, bytes_per_block]."""

    def __init__(self, pool: Tensor, host: Tensor, communicator: Communicator) -> None:
        self.host = host
        self._pool = pool
        self._communicator = communicator
        self._checksums = torch.zeros(len(host), dtype=torch.int64)
        self._copies: list[BlockCopy] = []  # not yet reported as ended, oldest first
        # Recent seconds per block.
        self._demote_times, self._restore_times = deque[float](maxlen=_NUM_MEASURED), deque[float](maxlen=_NUM_MEASURED)

    @abstractmethod
    def start_copies(self, plan: StepPlan) -> None:
        """Start the plan's demotes and restores after all earlier steps. The plan's own step waits for the demotes."""

    def add_copies(self, count: int) -> list[BlockCopy]:
        """Add copies in progress. All ranks add the same copies in the same order."""
        added = [BlockCopy() for _ in range(count)]
        self._copies += added
        return added

    def record_demotes(self, copies: list[BlockCopy], seconds: float) -> None:
        """Mark `copies` as done. `seconds`: for all of them."""
        self._demote_times.append(seconds / len(copies))
        for copy in copies:
            copy.status = CopyStatus.DONE

    def record_restores(self, copies: list[BlockCopy], is_intact: list[bool], seconds: float) -> None:
        """Mark `copies` as done, or as corrupt if the checksum differed."""
        self._restore_times.append(seconds / len(copies))
        for copy, good in zip(copies, is_intact, strict=True):
            copy.status = CopyStatus.DONE if good else CopyStatus.CORRUPT

    def report_copies(self) -> CopyReport | None:
        """The minimum status over ranks of each copy that was not reported as ended, and the largest time per block.

        None if there are no such copies.
        """
        if not self._copies:
            return None
        statuses = [copy.status for copy in self._copies]
        times = [-int(_typical(recent) * _NANO) for recent in (self._demote_times, self._restore_times)]
        *minimum, demote, restore = self._communicator.all_reduce_min([*statuses, *times])
        agreed = tuple(map(CopyStatus, minimum))
        self._copies = [
            copy for copy, status in zip(self._copies, agreed, strict=True) if status is CopyStatus.IN_PROGRESS
        ]
        return CopyReport(agreed, -demote / _NANO, -restore / _NANO)


class CpuBlockCopier(BlockCopier):
    """`pool` and `host` are both in host memory. Every copy is done when `start_copies` returns."""

    def start_copies(self, plan: StepPlan) -> None:
        if plan.demotes:
            began = time.perf_counter()
            blocks, slots = split_pairs(plan.demotes)
            self._checksums[slots] = transfer_blocks(self._pool, blocks, self.host, slots)
            self.record_demotes(self.add_copies(len(blocks)), time.perf_counter() - began)
        if plan.restores:
            began = time.perf_counter()
            slots, blocks = split_pairs(plan.restores)
            is_intact = transfer_blocks(self.host, slots, self._pool, blocks) == self._checksums[slots]
            copies = self.add_copies(len(blocks))
            self.record_restores(copies, is_intact.tolist(), time.perf_counter() - began)


def split_pairs(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The first and the second elements, int64 [n] each."""
    first, second = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    return first, second


def _typical(recent: deque[float]) -> float:
    """The lower median, so that one disturbed measurement, even the first of two, does not count."""
    return median_low(recent) if recent else 0.0
