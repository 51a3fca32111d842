"""CudaBlockCopier: the Copier of a rank on a GPU: copies run beside the computing, on a stream of their own.

Events both ways: the copies wait for all steps launched before them, since those write what goes out and may read
what lies where something comes in; the step waits for what goes out, since it writes over it. What comes in is read by
no step until all ranks have said that it is there, so no step waits for that. Checksums are made in host memory, by a
thread of its own: after the way out, before the way in. A copy on the bus itself is not checked. It does not know
which prefix a block holds.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from coatcheck.kernels.kv.move_blocks import sum_blocks
from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.block_copier import BlockCopier, BlockCopy, CopyLog, CpuBlockCopier, columns

_IDLE_SECONDS = 0.001


class CudaBlockCopier:
    """`pool` lies on the GPU, `host` in pinned memory. `thread` ends what it is given in that order, so that copies of
    one slot end as they were asked for."""

    def __init__(
        self, pool: Tensor, host: Tensor, communicator: Communicator, thread: Executor | None = None
    ) -> None:  # fmt: skip
        self.host = host
        self._pool = pool
        self._log = CopyLog(communicator)
        self._sums = torch.zeros(len(host), dtype=torch.int64)
        self._stream = torch.cuda.Stream(pool.device)
        self._thread = thread or ThreadPoolExecutor(1, "copier", initializer=lambda: torch.set_num_threads(1))
        self._work: deque[Future[None]] = deque()
        self._idle = False

    def start(self, plan: StepPlan) -> None:
        """Queues what goes out; what comes in is queued when it has been checked."""
        self._idle = not plan.rows
        if not (plan.demotes or plan.restores):
            return
        computing = torch.cuda.current_stream(self._pool.device)
        self._stream.wait_stream(computing)
        if plan.demotes:
            began, out = self._queue([(self.host[slot], self._pool[block]) for block, slot in plan.demotes])
            computing.wait_event(out)
            copies = self._log.begin(len(plan.demotes))
            self._work.append(self._thread.submit(self._end_demotes, plan.demotes, copies, began, out))
        if plan.restores:
            copies = self._log.begin(len(plan.restores))
            self._work.append(self._thread.submit(self._restore, plan.restores, copies))

    def report(self) -> CopyReport | None:
        """As of now; where the step computes nothing, it is worth a moment's wait."""
        if self._idle and self._work:
            wait(self._work, timeout=_IDLE_SECONDS)
        while self._work and self._work[0].done():
            self._work.popleft().result()  # raises what went wrong
        return self._log.report()

    def _queue(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Copies (to, from) on the stream; events before the first and after the last."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record(self._stream)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ended.record(self._stream)
        return began, ended

    def _end_demotes(
        self, pairs: Sequence[tuple[int, int]], copies: list[BlockCopy], began: torch.cuda.Event, out: torch.cuda.Event
    ) -> None:
        out.synchronize()
        summing = time.perf_counter()
        _, slots = columns(pairs)
        self._sums[slots] = sum_blocks(self.host, slots)
        self._log.demoted(copies, _seconds(began, out) + time.perf_counter() - summing)

    def _restore(self, pairs: Sequence[tuple[int, int]], copies: list[BlockCopy]) -> None:
        summing = time.perf_counter()
        slots, _ = columns(pairs)
        intact = (sum_blocks(self.host, slots) == self._sums[slots]).tolist()
        summed = time.perf_counter() - summing
        good = [pair for pair, is_good in zip(pairs, intact, strict=True) if is_good]
        began, ended = self._queue([(self._pool[block], self.host[slot]) for slot, block in good])
        ended.synchronize()
        self._log.restored(copies, intact, summed + _seconds(began, ended))


def _seconds(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    """What the copies took, not how long the stream had waited for the step before them."""
    return float(began.elapsed_time(ended)) / 1e3


def make_copier(pool: Tensor, host: Tensor, communicator: Communicator) -> BlockCopier:
    """What moves blocks between the two, by where the pool lies."""
    return (CudaBlockCopier if pool.device.type == "cuda" else CpuBlockCopier)(pool, host, communicator)
