"""QueueingGroup: a fake group that runs `slots` requests at once; further requests wait in it."""

import asyncio
from collections import deque

from coatcheck.proto.stubs.worker_pb2 import FromGroup, Submit
from tests.router.fake_group import FakeGroup


class QueueingGroup(FakeGroup):
    """Each request has one choice. `most_held`: the largest number of requests that the group held at any time."""

    def __init__(self, name: str, slots: int) -> None:
        super().__init__(name, max_num_seqs=slots, hold_after=0)
        self.most_held = 0
        self._queue: deque[tuple[Submit, asyncio.Queue[FromGroup | None]]] = deque()
        self._running = 0

    @property
    def held(self) -> int:
        """The number of requests that run or wait."""
        return self._running + len(self._queue)

    def report_load(self) -> None:
        """Reports its load to every router, with the number of the router's submissions that the report contains."""
        self.report(waiting=len(self._queue), running=self._running)

    def report_late(self) -> int:
        """Sends a report from before any submission, as if it had been delayed. Returns its count of preemptions, which
        shows whether a router has read the report."""
        self.load.status.preemptions += 1
        self.load.status.running = self.load.status.waiting = 0
        self.send(FromGroup(load=self.load))
        return self.load.status.preemptions

    def _spawn(self, submit: Submit, outbox: "asyncio.Queue[FromGroup | None]") -> None:
        self._queue.append((submit, outbox))
        self.most_held = max(self.most_held, self.held)
        self._fill()

    def _fill(self) -> None:
        while self._queue and self._running < self.max_num_seqs:
            self._running += 1
            task = asyncio.create_task(self._answer(*self._queue.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._leave)

    async def _answer(  # type: ignore[override]  # of the one choice
        self, submit: Submit, outbox: "asyncio.Queue[FromGroup | None]"
    ) -> None:
        await super()._answer(submit, 0, outbox)

    def _leave(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._running -= 1
        self._fill()
