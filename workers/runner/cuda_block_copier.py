"""CudaBlockCopier: copies KV blocks on a CUDA stream of its own, beside the steps.

- The copies wait for all steps launched before them, which write the demoted blocks, and may still read the blocks
  that a restore overwrites.
- A step waits for the demotes of its plan, because it may overwrite the demoted blocks.
- No step waits for restores: the scheduler uses a restored block only after all ranks have reported it.

A thread computes the checksums in host memory: after a demote, before a restore. An error on the bus between checksum
and GPU is not detected.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from coatcheck.kernels.kv.transfer_blocks import sum_blocks
from coatcheck.workers.core.runner_protocol import CopyReport
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.block_copier import BlockCopier, BlockCopy, CpuBlockCopier, Pairs, split_pairs

_IDLE_WAIT_SECONDS = 0.001


def make_copier(pool: Tensor, host: Tensor, communicator: Communicator) -> BlockCopier:
    """The copier for the device of `pool`."""
    return (CudaBlockCopier if pool.device.type == "cuda" else CpuBlockCopier)(pool, host, communicator)


class CudaBlockCopier(BlockCopier):
    """`pool`: on the GPU. `host`: pinned. `thread`: must run tasks in order, to keep copies of one slot ordered."""

    def __init__(self, pool: Tensor, host: Tensor, communicator: Communicator, thread: Executor | None = None) -> None:
        super().__init__(pool, host, communicator)
        self._stream = torch.cuda.Stream(pool.device)
        self._thread = thread or ThreadPoolExecutor(1, "copier", initializer=lambda: torch.set_num_threads(1))
        self._tasks: deque[Future[None]] = deque()
        self._is_idle_step = False

    def start_copies(self, plan: StepPlan) -> None:
        """Queue the demotes. The thread queues the restores once they are verified."""
        self._is_idle_step = not plan.scheduled
        if not (plan.demotes or plan.restores):
            return
        compute_stream = torch.cuda.current_stream(self._pool.device)
        self._stream.wait_stream(compute_stream)
        if plan.demotes:
            began, done = self._queue([(self.host[slot], self._pool[block]) for block, slot in plan.demotes])
            compute_stream.wait_event(done)
            copies = self.add_copies(len(plan.demotes))
            self._tasks.append(self._thread.submit(self._finish_demotes, plan.demotes, copies, began, done))
        if plan.restores:
            copies = self.add_copies(len(plan.restores))
            self._tasks.append(self._thread.submit(self._restore, plan.restores, copies))

    def report_copies(self) -> CopyReport | None:
        """In a step that computes nothing, first wait up to 1 ms for a copy, because the rank is idle."""
        if self._is_idle_step and self._tasks:
            wait(self._tasks, timeout=_IDLE_WAIT_SECONDS)
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()  # raises the task's exception
        return super().report_copies()

    def _queue(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue copies of (target, source). Returns events before the first and after the last."""
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record(self._stream)
        return began, done

    def _finish_demotes(
        self, pairs: Pairs, copies: list[BlockCopy], began: torch.cuda.Event, done: torch.cuda.Event
    ) -> None:
        done.synchronize()
        started = time.perf_counter()
        _, slots = split_pairs(pairs)
        self._checksums[slots] = sum_blocks(self.host, slots)
        self.record_demotes(copies, _seconds_between(began, done) + time.perf_counter() - started)

    def _restore(self, pairs: Pairs, copies: list[BlockCopy]) -> None:
        started = time.perf_counter()
        slots, _ = split_pairs(pairs)
        is_intact = (sum_blocks(self.host, slots) == self._checksums[slots]).tolist()
        checksum_seconds = time.perf_counter() - started
        intact = [pair for pair, is_good in zip(pairs, is_intact, strict=True) if is_good]
        began, done = self._queue([(self._pool[block], self.host[slot]) for slot, block in intact])
        done.synchronize()
        self.record_restores(copies, is_intact, checksum_seconds + _seconds_between(began, done))


def _seconds_between(began: torch.cuda.Event, done: torch.cuda.Event) -> float:
    """The time of the copies alone, without the stream's wait for earlier steps."""
    return float(began.elapsed_time(done)) / 1e3
