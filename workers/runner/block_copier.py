"""Copies KV blocks between a rank's pool and its host tier, checks them, and reports when all ranks are done.

    start_copies(plan)   ... the step is computed ...   report_copies() -> CopyReport

Every demoted block gets a checksum, which is verified when the block is restored. On a CPU the copies run on the rank's
threads, before the step: a CPU has no copy engine. On a GPU they run on two CUDA streams beside the steps, one for each
direction:

- The copies wait for all steps launched before them, which write the demoted blocks, and may still read the blocks
  that a restore overwrites.
- Demoted blocks are gathered into a staging buffer first, within the GPU's memory and before the plan's step, which may
  overwrite them. Two buffers take turns, so a step waits for the bus only if both still hold blocks of earlier plans.
- No step waits for restores: the scheduler uses a restored block only after all ranks have reported it.
- The GPU computes the checksums, on the stream of the copy: of the staging buffer, and of restored blocks in the pool.
  So errors of host memory and of the bus are detected, and checksums cost no host memory bandwidth, which the copies of
  eight ranks need. A thread waits for the copies, stores the sums of demotes and compares those of restores.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

from coatcheck.kernels.kv.transfer_blocks import sum_blocks, transfer_blocks
from coatcheck.workers.core.runner_protocol import CopyReport, CopyStatus
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.host_transfer import HostCopy, upload

_STAGING_BYTES = 1 << 27  # of each of the two buffers
_NUM_MEASURED = 5  # plans whose copy time counts
_IDLE_WAIT_SECONDS = 0.001
_NANO = 1e9
Pairs = Sequence[tuple[int, int]]


def make_copier(pool: Tensor, host: Tensor, communicator: Communicator) -> "BlockCopier":
    """The copier for the device of `pool`."""
    return (CudaBlockCopier if pool.device.type == "cuda" else CpuBlockCopier)(pool, host, communicator)


def num_staging_blocks(num_blocks: int, bytes_per_block: int) -> int:
    """Blocks in each of the two staging buffers of a GPU's pool of `num_blocks`."""
    return min(num_blocks, max(1, _STAGING_BYTES // bytes_per_block))


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
            blocks, host_blocks = _split_pairs(plan.demotes)
            self._checksums[host_blocks] = transfer_blocks(self._pool, blocks, self.host, host_blocks)
            self.record_demotes(self.add_copies(len(blocks)), time.perf_counter() - began)
        if plan.restores:
            began = time.perf_counter()
            host_blocks, blocks = _split_pairs(plan.restores)
            is_intact = transfer_blocks(self.host, host_blocks, self._pool, blocks) == self._checksums[host_blocks]
            copies = self.add_copies(len(blocks))
            self.record_restores(copies, is_intact.tolist(), time.perf_counter() - began)


class CudaBlockCopier(BlockCopier):
    """`pool`: on the GPU. `host`: pinned. `thread`: must run tasks in order, so that copies of a host block are."""

    def __init__(self, pool: Tensor, host: Tensor, communicator: Communicator, thread: Executor | None = None) -> None:
        super().__init__(pool, host, communicator)
        self._demotes, self._restores = (torch.cuda.Stream(pool.device) for _ in range(2))
        num_staged = num_staging_blocks(len(pool), pool.shape[1])
        self._staging = [torch.empty_like(pool[:num_staged]) for _ in range(2)]  # the next one to use comes first
        self._staging_read: list[torch.cuda.Event | None] = [None, None]  # after the last copy from each of them
        self._thread = thread or ThreadPoolExecutor(1, "copier", initializer=lambda: torch.set_num_threads(1))
        sum_blocks(pool, upload([0], torch.int64, pool.device))  # so that the kernel is not compiled later
        self._tasks: deque[Future[None]] = deque()
        self._is_idle_step = False

    def start_copies(self, plan: StepPlan) -> None:
        """Queue the demotes. The thread queues the restores once earlier demotes have arrived."""
        self._is_idle_step = not plan.scheduled
        if not (plan.demotes or plan.restores):
            return
        num_staged = len(self._staging[0])
        for first in range(0, len(plan.demotes), num_staged):
            pairs = plan.demotes[first : first + num_staged]
            queued = self._queue_demotes(pairs)
            copies = self.add_copies(len(pairs))
            self._tasks.append(self._thread.submit(self._finish_demotes, pairs, copies, queued))
        if plan.restores:
            self._restores.wait_stream(torch.cuda.current_stream(self._pool.device))
            copies = self.add_copies(len(plan.restores))
            self._tasks.append(self._thread.submit(self._restore, plan.restores, copies))

    def report_copies(self) -> CopyReport | None:
        """In a step that computes nothing, first wait up to 1 ms for a copy, because the rank is idle."""
        if self._is_idle_step and self._tasks:
            wait(self._tasks, timeout=_IDLE_WAIT_SECONDS)
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()  # raises the task's exception
        return super().report_copies()

    def _queue_demotes(self, pairs: Pairs) -> "_QueuedCopies":
        """Gather blocks into a staging buffer on the compute stream, and queue their copies to the host."""
        compute_stream = torch.cuda.current_stream(self._pool.device)
        staging, last_read = self._staging.pop(0), self._staging_read.pop(0)
        if last_read is not None:
            compute_stream.wait_event(last_read)
        staged = staging[: len(pairs)]
        blocks = upload([block for block, _ in pairs], torch.int64, self._pool.device)
        # Eight bytes at a time: every BlockLayout allows it.
        torch.index_select(self._pool.view(torch.int64), 0, blocks, out=staged.view(torch.int64))
        self._demotes.wait_stream(compute_stream)
        tensors = [(self.host[host_block], staged[index]) for index, (_, host_block) in enumerate(pairs)]
        queued = _QueuedCopies.start(self._demotes, tensors, staged, range(len(pairs)))
        self._staging.append(staging)
        self._staging_read.append(queued.done)
        return queued

    def _finish_demotes(self, pairs: Pairs, copies: list[BlockCopy], queued: "_QueuedCopies") -> None:
        sums = queued.wait_sums()
        _, host_blocks = _split_pairs(pairs)
        self._checksums[host_blocks] = sums
        self.record_demotes(copies, queued.seconds())

    def _restore(self, pairs: Pairs, copies: list[BlockCopy]) -> None:
        tensors = [(self._pool[block], self.host[host_block]) for host_block, block in pairs]
        queued = _QueuedCopies.start(self._restores, tensors, self._pool, [block for _, block in pairs])
        host_blocks, _ = _split_pairs(pairs)
        is_intact = queued.wait_sums() == self._checksums[host_blocks]
        self.record_restores(copies, is_intact.tolist(), queued.seconds())


@dataclass(frozen=True, slots=True)
class _QueuedCopies:
    """Copies of blocks on one stream, and the checksums of the blocks on the GPU. `began`, `done`: before the first and
    after the last."""

    began: torch.cuda.Event
    done: torch.cuda.Event
    sums: HostCopy

    @classmethod
    def start(
        cls,
        stream: torch.cuda.Stream,
        pairs: Sequence[tuple[Tensor, Tensor]],
        pool: Tensor,
        blocks: Sequence[int],
    ) -> "_QueuedCopies":
        """Queue copies of (target, source), then the checksums of `blocks` of `pool`."""
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record(stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            sums = sum_blocks(pool, upload(list(blocks), torch.int64, pool.device))
            done.record(stream)
            return cls(began, done, HostCopy.start(sums))

    def wait_sums(self) -> Tensor:
        """The checksums, int64 [blocks]. Block until copies and checksums are done."""
        return torch.tensor(self.sums.wait(), dtype=torch.int64)

    def seconds(self) -> float:
        """The time of copies and checksums alone, without the stream's wait for earlier steps."""
        return float(self.began.elapsed_time(self.done)) / 1e3


def _split_pairs(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The first and the second elements, int64 [n] each."""
    first, second = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    return first, second


def _typical(recent: deque[float]) -> float:
    """The lower median, so that one disturbed measurement, even the first of two, does not count."""
    return median_low(recent) if recent else 0.0
