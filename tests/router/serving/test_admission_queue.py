"""AdmissionQueue and Dispatcher: requests fill all room with few tries, and an error fails one request alone."""

import asyncio
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry

from coatcheck.proto.sampling import SamplingParams
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.serving.admission_queue import AdmissionQueue, Attempt
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from tests.examples import examples

CAPACITY = {"small": 10, "middle": 50, "large": 250}


class NamedGroups(EligibleGroups):
    """Groups of which only the names count."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__([])
        self.members = names


class NoConnections:
    """A GroupRegistry without connections."""

    def __init__(self) -> None:
        self.loads = LoadTable()

    def serving(self) -> list[GroupConnection]:
        return []


class RecordingDispatcher(Dispatcher):
    """A Dispatcher whose groups have room for a number of requests, and which records the group of each request."""

    def __init__(self, most: int) -> None:
        super().__init__(cast(GroupRegistry, NoConnections()), AdmissionQueue(most))
        self.room = dict.fromkeys(CAPACITY, 0)
        self.up = set(CAPACITY)
        self.sent: list[tuple[int, str]] = []
        self.attempts = 0
        self._classes = dict[frozenset[str], NamedGroups]()

    def eligible(self, length: int) -> NamedGroups:
        """The groups that can hold `length` tokens."""
        names = frozenset(name for name in self.up if CAPACITY[name] >= length)
        return self._classes.setdefault(names, NamedGroups(names))

    async def _wait_for_group(self, wait_seconds: float) -> None:
        """Some group always serves."""

    def _send_if_room(self, attempt: Attempt) -> Submission | None:
        """Sends to the smallest group that has room and can hold the request."""
        self.attempts += 1
        for name in sorted(self.eligible(attempt.request.max_len).members, key=CAPACITY.__getitem__):
            if self.room[name]:
                self.room[name] -= 1
                self.sent.append((int(attempt.request.request_id), name))
                return cast(Submission, object())
        return None

    def _scheduling_class(self, attempt: Attempt) -> NamedGroups:
        return self.eligible(attempt.request.max_len)

    def _prompt_seconds(self, attempt: Attempt) -> float:
        return 0.0


LIFECYCLE = RequestLifecycle(RequestMetrics(CollectorRegistry()))


def attempt_of(number: int, length: int, tenant: str = "a") -> Attempt:
    """Attempt of a request of `length` tokens, prompt and answer together."""
    params = SamplingParams(max_tokens=1, seed=1)
    return Attempt(Request(str(number), [1] * (length - 1), params, tenant=Tenant(tenant)), LIFECYCLE)


LENGTHS = st.integers(2, 250)
EVENTS = st.one_of(
    st.tuples(st.just("come"), st.lists(st.tuples(LENGTHS, st.sampled_from(["a", "b"])), min_size=1, max_size=5)),
    st.tuples(st.just("ease"), st.dictionaries(st.sampled_from(sorted(CAPACITY)), st.integers(1, 3))),
    st.tuples(st.just("serve"), st.sets(st.sampled_from(sorted(CAPACITY)))),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_all_room_is_filled_with_few_tries(events: list[tuple[str, Any]]) -> None:
    """For any arrivals, room and serving groups: no request waits for which a group has room; requests of one tenant
    that can go to the same groups are sent in order of age; and at most one try fails for each set of eligible
    groups."""

    async def run() -> None:
        dispatcher, lengths, tenants = RecordingDispatcher(1000), dict[int, int](), dict[int, str]()
        tasks: list[asyncio.Task[object]] = []
        for kind, what in events:
            before, dispatcher.attempts = len(dispatcher.sent), 0
            came = len(what) if kind == "come" else 0
            if kind == "come":
                for length, tenant in what:
                    number = len(tasks)
                    lengths[number], tenants[number] = length, tenant
                    attempt = attempt_of(number, length, tenant)
                    assert attempt.request.max_len == length
                    tasks.append(asyncio.create_task(dispatcher.admit(attempt)))
                await asyncio.sleep(0)
            elif kind == "ease":
                for name, count in what.items():
                    dispatcher.room[name] += count
                dispatcher.send_waiting()
            else:
                dispatcher.up = what
                dispatcher.update_serving()
            dispatcher.queue.check()
            went = {number for number, _ in dispatcher.sent}
            waits = [number for number in lengths if number not in went]
            assert len(waits) == len(dispatcher.queue)
            assert not any(dispatcher.room[name] for n in waits for name in dispatcher.eligible(lengths[n]).members)
            classes = {dispatcher.eligible(length) for length in lengths.values()}
            # A new request may be tried alone, and again with the first of each other class.
            assert dispatcher.attempts <= len(dispatcher.sent) - before + (came + 1) * (len(classes) + 1)
            for place, (number, _) in enumerate(dispatcher.sent[before:], before):
                rivals = {*waits, *(other for other, _ in dispatcher.sent[place + 1 :])}
                assert not any(
                    other < number
                    for other in rivals
                    if tenants[other] == tenants[number]
                    and dispatcher.eligible(lengths[other]) == dispatcher.eligible(lengths[number])
                )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


class FaultyDispatcher(RecordingDispatcher):
    """Raises an error when it sends request 0."""

    is_faulty = False

    def _send_if_room(self, attempt: Attempt) -> Submission | None:
        if self.is_faulty and attempt.request.request_id == "0":
            raise ZeroDivisionError
        return super()._send_if_room(attempt)


async def test_an_error_in_sending_fails_one_request() -> None:
    """An unexpected error in sending a request fails this request; the next one is sent."""
    dispatcher = FaultyDispatcher(10)
    faulty, good = (asyncio.create_task(dispatcher.admit(attempt_of(n, 2))) for n in (0, 1))
    await asyncio.sleep(0)  # both come
    assert len(dispatcher.queue) == 2
    dispatcher.is_faulty, dispatcher.room["small"] = True, 1
    dispatcher.send_waiting()
    with pytest.raises(ZeroDivisionError):
        await faulty
    await good
    assert dispatcher.sent == [(1, "small")] and not len(dispatcher.queue)
    dispatcher.queue.check()


async def test_few_of_many_waiting_requests_are_tried() -> None:
    """A thousand waiting requests of many lengths cost three tries, one for each set of groups that can hold them."""
    dispatcher = RecordingDispatcher(2000)
    attempts = [attempt_of(number, 2 + number % 249) for number in range(1000)]
    tasks = [asyncio.create_task(dispatcher.admit(attempt)) for attempt in attempts]
    await asyncio.sleep(0)
    assert len(dispatcher.queue) == 1000 and dispatcher.attempts < 20
    dispatcher.attempts = 0
    dispatcher.send_waiting()
    assert dispatcher.attempts == 3
    dispatcher.room["small"] = 2
    dispatcher.send_waiting()
    assert dispatcher.attempts == 3 + 2 + 3 and [name for _, name in dispatcher.sent] == ["small"] * 2
    dispatcher.queue.check()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
