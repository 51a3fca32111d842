"""A busy event loop and a blocked one are told apart from another thread."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from coatcheck.router.loop_pulse import Heartbeat, LoopHeartbeat


@pytest.mark.parametrize(
    ("silent", "busy", "hangs"),
    [(0.0, 0.0, False), (20.0, 0.0, False), (31.0, 0.5, True), (31.0, 25.0, False), (121.0, 120.0, True)],
)
def test_what_counts_as_hung(silent: float, busy: float, hangs: bool) -> None:
    """A loop that computes has two minutes, one that does not half of one."""
    assert bool(Heartbeat(silent, busy).hang_reason) is hangs


def compute(is_over: threading.Event) -> None:
    """Keeps the processor."""
    while not is_over.is_set():
        sum(range(1000))


def wait(is_over: threading.Event) -> None:
    """Keeps the loop, and does nothing."""
    is_over.wait()


@pytest.mark.parametrize(("work", "is_busy"), [(compute, True), (wait, False)])
async def test_a_pulse_is_read_while_the_loop_stands(work: Callable[[threading.Event], None], is_busy: bool) -> None:
    """Another thread sees for how long the loop has not gone round, and whether it computes."""
    heartbeat, is_over, seen = LoopHeartbeat(), threading.Event(), list[Heartbeat]()

    def watch() -> None:
        before = time.thread_time()
        while not seen or (seen[-1].silent_seconds < 1.0 or (is_busy and seen[-1].busy_seconds < 0.2)):
            seen.append(heartbeat.read())
            time.sleep(0.01)
            if time.thread_time() - before > 60:
                break
        is_over.set()

    watcher = threading.Thread(target=watch)
    await asyncio.sleep(0)
    watcher.start()
    work(is_over)
    watcher.join()
    assert seen[-1].silent_seconds >= 1.0
    assert (seen[-1].busy_seconds >= 0.2) is is_busy
    heartbeat.close()
