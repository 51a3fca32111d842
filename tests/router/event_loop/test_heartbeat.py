"""Another thread can tell a busy event loop from a blocked one."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from coatcheck.router.event_loop.heartbeat import Heartbeat, LoopHeartbeat


@pytest.mark.parametrize(
    ("silent", "busy", "starved", "hangs"),
    [
        (0.0, 0.0, 0.0, False),
        (20.0, 0.0, 0.0, False),
        (31.0, 0.5, 0.5, True),
        (31.0, 25.0, 0.0, False),
        (31.0, 0.5, 25.0, False),
        (400.0, 8.0, 390.0, False),
        (125.0, 121.0, 0.0, True),
    ],
)
def test_what_counts_as_hung(silent: float, busy: float, starved: float, hangs: bool) -> None:
    """A loop counts as hung once it has computed for two minutes, and after 30 s if it neither computes nor waits for a
    CPU."""
    assert bool(Heartbeat(silent, busy, starved).hang_reason) is hangs


async def test_a_loop_that_gets_no_cpu_is_starved() -> None:
    """Beside another process on the same CPU a busy loop reports the time for which it waited for that CPU."""
    cpus = os.sched_getaffinity(0)
    heartbeat = LoopHeartbeat()
    os.sched_setaffinity(0, {min(cpus)})  # of this thread and of what it starts
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        while heartbeat.read().starved_seconds < 0.1:
            sum(range(1000))
    finally:
        other.kill()
        await other.wait()
        os.sched_setaffinity(0, cpus)
        heartbeat.close()


def compute(is_over: threading.Event) -> None:
    """Blocks the loop and uses the CPU."""
    while not is_over.is_set():
        sum(range(1000))


def wait(is_over: threading.Event) -> None:
    """Blocks the loop without using the CPU."""
    is_over.wait()


@pytest.mark.parametrize(("work", "is_busy"), [(compute, True), (wait, False)])
async def test_a_heartbeat_is_read_while_the_loop_is_blocked(
    work: Callable[[threading.Event], None], is_busy: bool
) -> None:
    """Another thread reads for how long the loop has been silent, and whether it computes."""
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
