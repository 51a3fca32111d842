"""A group is group running: the names of its starts, what is learned of its ends, and when it is given up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.cluster.supervision.group_supervisor import GroupSupervisor, backoff_seconds
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.rank_end import read_log_tail
from coatcheck.proto.errors import Unavailable
from coatcheck.router.groups.group_failures import FailureCause, GroupFailures
from tests.cluster.supervision.fake_ranks import SERVING, FakeRanks

FAULT = "rank 1: Segmentation fault"


class Supervised:
    """A GroupSupervisor at work, and every state that it has published."""

    def __init__(self, ranks: FakeRanks, has_served: bool, poll_seconds: float) -> None:
        self.ranks = ranks
        self.told: list[GroupState] = []
        self._changed = asyncio.Event()
        self.supervisor = GroupSupervisor(
            ranks,
            PollInterval(poll_seconds),
            has_served=has_served,
            on_change=self._record_state,
            backoff=lambda failures: 0.0,
        )
        self.task = asyncio.create_task(self._supervise())

    async def until(self, holds: Callable[[GroupState], bool]) -> GroupState:
        """Wait until `holds` is true for the group's state, and return the state."""
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not holds(self.supervisor.state):
                self._changed.clear()
                await self._changed.wait()
        return self.supervisor.state

    async def _supervise(self) -> None:
        await self.supervisor.adopt_group()
        await self.supervisor.supervise_group()

    def _record_state(self) -> None:
        self.told.append(self.supervisor.state)
        self._changed.set()


Supervise = Callable[..., Supervised]


@pytest.fixture
async def supervise() -> AsyncIterator[Supervise]:
    """Supervises FakeRanks until the test ends."""
    supervised: list[Supervised] = []

    def started(ranks: FakeRanks, *, has_served: bool = False, poll_seconds: float = 0.5) -> Supervised:
        supervised.append(Supervised(ranks, has_served, poll_seconds))
        return supervised[-1]

    yield started
    for one in supervised:
        one.task.cancel()
    await asyncio.gather(*(one.task for one in supervised), return_exceptions=True)


def serves(start: int) -> Callable[[GroupState], bool]:
    return lambda state: state.state == "serving" and state.restarts == start


@pytest.mark.parametrize("crash", [FAULT, ""], ids=["crash", "killed"])
async def test_how_a_group_has_ended_is_learned_after_starts_that_fail_early(supervise: Supervise, crash: str) -> None:
    """Two starts fail before their ranks run, as if an actor's name were taken. The third still learns how the
    incarnation ended that requests were lost with, and routers assign it to that incarnation."""
    group = supervise(FakeRanks(["serves", "ends early", "ends early"]))
    lost = await group.until(serves(0))
    failures = GroupFailures()
    loss = failures.record_loss("g", lost.incarnation, "the stream broke", FailureCause.UNKNOWN)
    group.ranks.crash(crash)
    state = await group.until(serves(3))
    assert group.ranks.starts == [(0, 0), (1, 1), (2, 1), (3, 1)], "each start has names of its own"
    assert (state.incarnation, state.previous_crash) == (1, crash)
    failures.record_cause("g", state.incarnation - 1, crash)
    assert loss.cause is (FailureCause.CRASH if crash else FailureCause.KILLED)


@pytest.mark.parametrize(("crash", "cause"), [(FAULT, FAULT), ("", "no rank crashed: it was killed")])
async def test_a_group_that_serves_again_keeps_the_cause(supervise: Supervise, crash: str, cause: str) -> None:
    """After a restart `last_failure` has the error and the crash record, or that the rank was killed from outside; a
    requested restart replaces it."""
    group = supervise(FakeRanks())
    assert (await group.until(serves(0))).last_failure == ""
    group.ranks.crash(crash)
    failure = (await group.until(serves(1))).last_failure
    assert failure.startswith("rank 1 has ended: ") and cause in failure
    await group.supervisor.restart_group()
    assert group.supervisor.state.last_failure == "requested by `coatcheck restart`"


def test_the_end_of_a_log_is_one_line(tmp_path: Path) -> None:
    """The last three lines that are not empty, without round brackets; nothing for a file of another host."""
    path = tmp_path / "log"
    path.write_text("a\nb\nc (1)\n\n" + "d" * 999 + "\n")
    assert read_log_tail(str(path)) == "b | c [1] | " + "d" * 200
    assert read_log_tail(str(tmp_path / "missing")) == ""


def test_the_last_lines_of_a_log_are_not_about_single_requests(tmp_path: Path) -> None:
    """A rank that is killed has logged thousands of these, and they say nothing about its end."""
    ended = (
        "2026-11-26 18:43:55 INFO coatcheck.workers.service.request_log: submission ended request_id='r' seconds=1.0\n"
    )
    path = tmp_path / "rank.log"
    path.write_text("serving\n" + 5 * ended)
    assert read_log_tail(str(path)) == "serving"
    path.write_text(99 * ended)
    assert read_log_tail(str(path)) == ""
    path.write_text(3 * ended + "Fatal Python error: Segmentation fault\n")
    assert read_log_tail(str(path)) == "Fatal Python error: Segmentation fault"


async def test_a_start_that_fails_late_is_an_incarnation(supervise: Supervise) -> None:
    """Ranks that end while they load are an incarnation: they report how their predecessors ended, and their successors
    report how they did."""
    group = supervise(FakeRanks(["serves", "ends late"]))
    await group.until(serves(0))
    group.ranks.crash(FAULT)
    state = await group.until(serves(2))
    assert group.ranks.starts == [(0, 0), (1, 1), (2, 2)]
    told = {state.incarnation: state.previous_crash for state in group.told if state.previous_crash is not None}
    assert told == {1: FAULT, 2: "rank 0: OutOfMemoryError"}
    assert state.previous_crash == "rank 0: OutOfMemoryError"


@pytest.mark.parametrize("how", ["ends early", "ends late"])
async def test_only_one_that_has_served_is_tried_again(supervise: Supervise, how: str) -> None:
    """A group whose first start fails is given up with the reason. A group that served under a former supervisor is
    not."""
    new = supervise(FakeRanks([how]))
    await new.task
    assert new.supervisor.state.state == "failed" and new.supervisor.state.reason
    with pytest.raises(Unavailable, match="g does not start: rank 0"):
        await new.supervisor.wait_until_serving()
    await supervise(FakeRanks([how]), has_served=True).until(serves(1))


async def test_a_requested_restart_is_no_failure(supervise: Supervise) -> None:
    """A requested restart stops the old ranks gracefully; the new ranks are another incarnation."""
    group = supervise(FakeRanks())
    await group.until(serves(0))
    await group.supervisor.restart_group()
    assert group.ranks.graceful_stops == 1 and group.ranks.starts == [(0, 0), (1, 1)]
    assert (group.supervisor.state.state, group.supervisor.state.previous_crash) == ("serving", "")
    group.supervisor.drain_group()
    assert group.supervisor.state.state == "draining"
    group.supervisor.undrain_group()
    assert group.supervisor.state.state == "serving"


async def test_a_check_that_is_requested_is_made_at_once(supervise: Supervise) -> None:
    """Ranks are checked when asked for, and a group is restarted when asked for, although the next check is far off."""
    group = supervise(FakeRanks(), poll_seconds=3600.0)
    await group.until(serves(0))
    before = group.ranks.checks
    group.supervisor.check_now()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while group.ranks.checks == before:  # noqa: ASYNC110  # a check has no event
            await asyncio.sleep(0.005)
        await group.supervisor.restart_group()
    await group.until(serves(1))


async def test_a_requested_restart_that_fails_says_so(supervise: Supervise) -> None:
    """If the ranks of a requested restart do not start, the caller gets the reason, and the group is started again."""
    group = supervise(FakeRanks(["serves", "ends late"]))
    await group.until(serves(0))
    with pytest.raises(Unavailable, match="g does not start again: rank 0 has ended: out of memory"):
        await group.supervisor.restart_group()
    await group.until(serves(2))


async def test_ranks_that_serve_are_adopted(supervise: Supervise) -> None:
    """Ranks that serve are taken over with their start number. If none are left, the next start has the next number."""
    group = supervise(FakeRanks(adopted=(4, (SERVING, SERVING))), has_served=True)
    state = await group.until(serves(4))
    assert not group.ranks.starts and (state.incarnation, state.address) == (4, SERVING.address)
    other = supervise(FakeRanks(adopted=(4, ())), has_served=True)
    await other.until(serves(5))
    assert other.ranks.starts == [(5, 5)]


def test_many_actors_are_polled_less_often() -> None:
    """All actors together get at most 30 calls a second. A single actor's interval varies by a quarter."""
    interval = PollInterval(0.5)
    for actors, seconds in ((1, 0.5), (15, 0.5), (64, 64 / 30), (1000, 1000 / 30)):
        interval.actors = actors
        waits = [interval.next_wait() for _ in range(100)]
        assert 0.75 * seconds <= min(waits) < max(waits) <= 1.25 * seconds


def test_restarts_come_soon_and_then_slower() -> None:
    """The backoff begins at half a second, doubles with each failure, and ends at half a minute."""
    waits = [backoff_seconds(failures) for failures in range(1, 12)]
    assert waits[0] == 0.5 and waits == sorted(waits) and waits[-1] == 30.0


async def test_a_restart_does_not_wait_for_nodes(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the group's node goes while it restarts, the restart fails with the reason, so that the cluster can be scaled
    meanwhile. The group starts once there is a node."""
    ranks = FakeRanks()
    group = supervise(ranks)
    await group.until(serves(0))
    has_nodes = False

    async def find_nodes() -> bool:
        return has_nodes

    monkeypatch.setattr(ranks, "find_nodes", find_nodes)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        with pytest.raises(Unavailable, match="g does not start again: it waits for nodes"):
            await group.supervisor.restart_group()
        with pytest.raises(Unavailable, match="g does not start: it waits for nodes"):
            await group.supervisor.wait_until_serving()
    has_nodes = True
    await group.until(serves(1))
