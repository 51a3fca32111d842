"""Side processes: results and errors come back, and what ends a child ends only the call that it ran."""

import asyncio
import gc
import operator
import os
import signal
import time
import weakref
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidRequest, Overloaded, Unavailable
from coatcheck.router.event_loop.side_process import SideProcesses
from tests.cluster.running_server import until


@pytest.fixture
async def side() -> AsyncIterator[SideProcesses]:
    """One child, behind which one call may wait."""
    side = SideProcesses(processes=1, max_waiting=2)
    yield side
    await asyncio.to_thread(side.close)


def refuse(reason: str) -> None:
    """Raises an error that a client hears."""
    raise InvalidRequest(reason)


@pytest.mark.usefixtures("tests_are_importable")
async def test_results_and_errors_come_back(side: SideProcesses) -> None:
    """A result is returned, an error of ours is raised, and another error says what failed."""
    assert await side.run(operator.mul, "ab", 3) == "ababab"
    with pytest.raises(InvalidRequest, match="too many"):
        await side.run(refuse, "too many")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await side.run(operator.floordiv, 1, 0)
    assert await side.run_unlimited(operator.add, 1, 2) == 3


async def test_a_child_that_ends_is_replaced(side: SideProcesses) -> None:
    """The call whose child the kernel kills is refused; the next call gets a new child."""
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await side.run(os._exit, 1)
    assert await side.run(operator.add, 1, 2) == 3


def kill_itself_unless(mark: str) -> str:
    """Ends its process as the kernel's killer does; if the file `mark` exists, returns a result."""
    if not os.path.exists(mark):
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@pytest.mark.usefixtures("tests_are_importable")
async def test_a_call_whose_child_is_killed_runs_again(side: SideProcesses, tmp_path: Path) -> None:
    """The kernel's killer may take a child for the memory of others: the call gets another child, but not a third."""
    assert await side.run(kill_itself_unless, str(tmp_path / "mark")) == "done"
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await side.run(signal.raise_signal, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
async def test_signals_to_a_whole_service_leave_children(side: SideProcesses, number: signal.Signals) -> None:
    """A terminal and systemd send these to every process; the router lets its requests end, and needs its children."""
    await side.run(signal.raise_signal, number)


async def test_too_many_calls_are_refused_but_answers_wait(side: SideProcesses) -> None:
    """With as many calls as may wait a further one is Overloaded; one that finishes an answer waits for its turn."""
    calls = [asyncio.create_task(side.run(time.sleep, 0.2)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await side.run(operator.add, 1, 2)
    assert await side.run_unlimited(operator.add, 1, 2) == 3
    await asyncio.gather(*calls)


async def test_a_cancelled_call_keeps_no_arguments(side: SideProcesses) -> None:
    """A client that disconnects while its body waits for a child frees the body at once."""
    running = asyncio.create_task(side.run(time.sleep, MAX_WAIT_SECONDS))
    await asyncio.sleep(0)
    argument = array("b", b"abc")
    kept = weakref.ref(argument)
    waiting = asyncio.create_task(side.run(len, argument))
    del argument
    await asyncio.sleep(0)
    assert kept() is not None
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    del waiting
    gc.collect()
    assert kept() is None
    running.cancel()


async def test_a_call_that_runs_while_it_closes_is_unavailable() -> None:
    """A client hears that the router stops, not that its request was too large."""
    side = SideProcesses(processes=1)
    assert await side.run(operator.add, 1, 2) == 3
    call = asyncio.create_task(side.run(time.sleep, MAX_WAIT_SECONDS))
    await asyncio.sleep(0)
    await asyncio.to_thread(until, side._threads._work_queue.empty, "a thread has taken the call")
    await asyncio.to_thread(side.close)
    with pytest.raises(Unavailable, match="stopping"):
        await call
