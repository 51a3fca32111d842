"""BlockCopier: one rank's part in moving blocks between its pool and its host memory, and the word that it is done.

    start(plan) ... the step is computed ... report() -> CopyReport of what is under way on any rank

Every block that goes out leaves a checksum behind, which is made again as it comes back. On a CPU there is no engine
that copies beside the cores, so copies are made here and now by all of the rank's threads; the plan asks for no more
than its step has time for. It does not know which prefix a block holds, nor why it moves.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

import torch
from torch import Tensor

from coatcheck.kernels.kv.move_blocks import move_blocks
from coatcheck.workers.core.copy_report import CopyReport, CopyStatus
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator

_PLANS = 5  # so many with copies are what "lately" is
_NANO = 1e9
Pairs = Sequence[tuple[int, int]]


class BlockCopier(Protocol):
    """What a ModelRunner has when there is a host tier."""

    def start(self, plan: StepPlan) -> None:
        """Begins the plan's demotes and restores: before the plan's step computes, and after every step before it."""

    def report(self) -> CopyReport | None:
        """What all ranks say of all copies begun and not yet reported as ended; None if there are none."""


@dataclass(slots=True, eq=False)
class BlockCopy:
    """One block's; whoever copies says how it ended."""

    status: CopyStatus = CopyStatus.IN_PROGRESS


class CopyLog:
    """What one rank has been asked to copy, how far that is, and how long a block takes."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._copies: list[BlockCopy] = []  # those that no report has said to be ended, oldest first
        self._demote, self._restore = deque[float](maxlen=_PLANS), deque[float](maxlen=_PLANS)

    def begin(self, count: int) -> list[BlockCopy]:
        """The next copies."""
        begun = [BlockCopy() for _ in range(count)]
        self._copies += begun
        return begun

    def demoted(self, copies: list[BlockCopy], seconds: float) -> None:
        """They lie in host memory."""
        self._demote.append(seconds / len(copies))
        for copy in copies:
            copy.status = CopyStatus.DONE

    def restored(self, copies: list[BlockCopy], intact: list[bool], seconds: float) -> None:
        """They lie in the pool, or are not what they were."""
        self._restore.append(seconds / len(copies))
        for copy, good in zip(copies, intact, strict=True):
            copy.status = CopyStatus.DONE if good else CopyStatus.CORRUPT

    def report(self) -> CopyReport | None:
        """Agreed among the ranks, which were all asked for the same; what has ended everywhere is forgotten."""
        if not self._copies:
            return None
        mine = [copy.status for copy in self._copies]
        seconds = [-int(_usual(lately) * _NANO) for lately in (self._demote, self._restore)]
        *statuses, demote, restore = self._communicator.all_reduce_min([*mine, *seconds])
        agreed = tuple(map(CopyStatus, statuses))
        self._copies = [
            copy for copy, status in zip(self._copies, agreed, strict=True) if status is CopyStatus.IN_PROGRESS
        ]
        return CopyReport(agreed, -demote / _NANO, -restore / _NANO)


class CpuBlockCopier:
    """`host` is uint8 [host_blocks, bytes_per_block], in the same memory as the pool."""

    def __init__(self, pool: Tensor, host: Tensor, communicator: Communicator) -> None:
        self.host = host
        self._pool = pool
        self._log = CopyLog(communicator)
        self._sums = torch.zeros(len(host), dtype=torch.int64)

    def start(self, plan: StepPlan) -> None:
        """Copies it all."""
        if plan.demotes:
            began = time.perf_counter()
            blocks, slots = columns(plan.demotes)
            self._sums[slots] = move_blocks(self._pool, blocks, self.host, slots)
            self._log.demoted(self._log.begin(len(blocks)), time.perf_counter() - began)
        if plan.restores:
            began = time.perf_counter()
            slots, blocks = columns(plan.restores)
            intact = move_blocks(self.host, slots, self._pool, blocks) == self._sums[slots]
            self._log.restored(self._log.begin(len(blocks)), intact.tolist(), time.perf_counter() - began)

    def report(self) -> CopyReport | None:
        """As of now."""
        return self._log.report()


def columns(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Both halves of the pairs, int64 [n]."""
    first, second = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    return first, second


def _usual(lately: deque[float]) -> float:
    """The median, of two the lower: one bad moment of the machine, be it the first, is no price."""
    return median_low(lately) if lately else 0.0
