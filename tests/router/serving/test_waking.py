"""When the admission queue is tried: only once a group gains room, and then only until none has room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.offline_groups import OfflineConnection, OfflineGroups, load_report
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.worker_pb2 import FromGroup, Refused
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.serving.admission_queue import AdmissionQueue, Attempt
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics

BLOCKS = 100
FULL = 1000  # waiting requests of a group without room
LIFECYCLE = RequestLifecycle(RequestMetrics(CollectorRegistry()))


class CountingDispatcher(Dispatcher):
    """A Dispatcher that counts how often it tries to send a request."""

    tries = 0

    def _send_if_room(self, attempt: Attempt) -> Submission | None:
        self.tries += 1
        return super()._send_if_room(attempt)


@asynccontextmanager
async def full_cluster(groups: int, waiting: int) -> AsyncIterator[tuple[OfflineGroups, CountingDispatcher]]:
    """Groups without room, and requests that wait for them."""
    registry = OfflineGroups(groups, BLOCKS)
    dispatcher = CountingDispatcher(registry, AdmissionQueue(waiting))
    registry.start()
    for member in registry.members:
        member.receive(load_report(BLOCKS, waiting=FULL))
    params = SamplingParams(max_tokens=1, seed=1)
    requests = [Request(str(number), range(200), params, cache_salt=str(number)) for number in range(waiting)]
    tasks = [asyncio.create_task(dispatcher.admit(Attempt(request, LIFECYCLE))) for request in requests]
    await asyncio.sleep(0)
    assert len(dispatcher.queue) == waiting
    dispatcher.tries = 0
    yield registry, dispatcher
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    registry.check()
    await registry.close()


async def test_reports_of_full_groups_try_no_request() -> None:
    """While no group has room, load reports leave the queue alone, however many requests wait."""
    async with full_cluster(groups=5, waiting=50) as (registry, dispatcher):
        for _ in range(10):
            for member in registry.members:
                member.receive(load_report(BLOCKS, waiting=FULL))
        assert dispatcher.tries <= 1, "at most once, because a group had room before the first request came"
        assert len(dispatcher.queue) == 50


async def test_room_on_one_group_sends_what_fits_there() -> None:
    """A report with room sends requests until the group has no more room: one try per request, and one that fails. The
    reports of the others, and a further report that changes nothing, try none."""
    async with full_cluster(groups=5, waiting=50) as (registry, dispatcher):
        member = registry.members[3]
        member.receive(load_report(BLOCKS))
        sent = 50 - len(dispatcher.queue)
        assert 0 < sent < 50 and len(member.submissions) == sent and not member.load.has_room
        assert dispatcher.tries == sent + 1
        for other in (registry.members[0], member):
            other.receive(load_report(BLOCKS, waiting=FULL))
        assert dispatcher.tries == sent + 1


async def test_a_submission_that_ends_makes_room() -> None:
    """A request that ends before the next report leaves its place to one that waits."""
    async with full_cluster(groups=1, waiting=50) as (registry, dispatcher):
        (member,) = registry.members
        member.receive(load_report(BLOCKS))
        before = len(dispatcher.queue)
        close_submission(member, 1)
        assert len(dispatcher.queue) == before - 1


async def test_a_group_that_has_refused_gets_requests_after_its_next_report() -> None:
    """A refusal takes the group's room away, whatever ends there; the next report gives the room back."""
    async with full_cluster(groups=1, waiting=50) as (registry, dispatcher):
        (member,) = registry.members
        member.receive(load_report(BLOCKS))
        before = len(dispatcher.queue)
        member.receive(FromGroup(refused=Refused(id=1, attempt=0, code=8, message="full")))
        close_submission(member, 2)
        assert len(dispatcher.queue) == before
        member.receive(load_report(BLOCKS))
        assert len(dispatcher.queue) == before - 1


def close_submission(member: OfflineConnection, id: int) -> None:
    """Ends an open submission of the group."""
    submission = member.submissions.get(id)
    assert submission is not None
    submission.close(finished=True)
