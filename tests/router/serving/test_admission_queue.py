"""What one move of the line places: all that groups have room for, with few tries; a fault fails one request alone."""

import asyncio
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coatcheck.proto.sampling import SamplingParams as SamplingParameters
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.admission_queue import AdmissionQueue
from coatcheck.router.serving.assignment import Assignment

CAPACITY = {"small": 10, "middle": 50, "large": 250}


class Ledger:
    """Groups with room for a number of requests, and which group each request was placed on."""

    def __init__(self) -> None:
        self.room = dict.fromkeys(CAPACITY, 0)
        self.serving = set(CAPACITY)
        self.placed: list[tuple[int, str]] = []
        self.attempts = 0

    def eligible(self, length: int) -> EligibleGroups:
        """As a router finds it."""
        return EligibleGroups(frozenset(name for name in self.serving if CAPACITY[name] >= length))

    def place(self, number: int, length: int) -> Assignment | None:
        """On the smallest group that has room and can hold it."""
        self.attempts += 1
        for name in sorted(self.eligible(length).names, key=CAPACITY.__getitem__):
            if self.room[name]:
                self.room[name] -= 1
                self.placed.append((number, name))
                return cast(Assignment, object())
        return None


LENGTHS = st.integers(1, 250)
EVENTS = st.one_of(
    st.tuples(st.just("come"), st.lists(st.tuples(LENGTHS, st.sampled_from(["a", "b"])), min_size=1, max_size=5)),
    st.tuples(st.just("ease"), st.dictionaries(st.sampled_from(sorted(CAPACITY)), st.integers(1, 3))),
    st.tuples(st.just("serve"), st.sets(st.sampled_from(sorted(CAPACITY)))),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_a_move_fills_all_room_with_few_tries(events: list[tuple[str, Any]]) -> None:
    """Whoever comes, whatever room there is and whichever groups serve: after each move nobody waits for whom a group
    has room; of each tenant those that can go to the same groups go in order of age; and no more is tried than those
    that are placed and one for each different set of groups."""

    async def run() -> None:
        ledger, line, lengths, tenants = Ledger(), AdmissionQueue(1000), dict[int, int](), dict[int, str]()
        tasks: list[asyncio.Task[object]] = []

        async def come(number: int) -> None:
            tokens = [1] * (lengths[number] - 1)
            request = Request(
                str(number), tokens, SamplingParameters(max_tokens=1, seed=1), tenant=Tenant(tenants[number])
            )
            length = lengths[number]
            assert request.max_len == length
            await line.placed(
                request, lambda: ledger.place(number, length), lambda: ledger.eligible(length), lambda: 0.0
            )

        for kind, what in events:
            before, ledger.attempts = len(ledger.placed), 0
            came = len(what) if kind == "come" else 0
            if kind == "come":
                for length, tenant in what:
                    number = len(tasks)
                    lengths[number], tenants[number] = length, tenant
                    tasks.append(asyncio.create_task(come(number)))
                await asyncio.sleep(0)
            elif kind == "ease":
                for name, count in what.items():
                    ledger.room[name] += count
                line.move()
            else:
                ledger.serving = what
                line.reclassify()
            line.check()
            went = {number for number, _ in ledger.placed}
            waits = [number for number in lengths if number not in went]
            assert len(waits) == len(line)
            assert not any(ledger.room[name] for number in waits for name in ledger.eligible(lengths[number]).names)
            classes = {ledger.eligible(length) for length in lengths.values()}
            # Whoever comes may be tried by itself, and again with the first of each other class.
            assert ledger.attempts <= len(ledger.placed) - before + (came + 1) * (len(classes) + 1)
            for placed, (number, _) in enumerate(ledger.placed[before:], before):
                rivals = {*waits, *(other for other, _ in ledger.placed[placed + 1 :])}
                assert not any(
                    other < number
                    for other in rivals
                    if tenants[other] == tenants[number]
                    and ledger.eligible(lengths[other]) == ledger.eligible(lengths[number])
                )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


async def test_a_request_that_cannot_be_placed_for_a_fault_fails_alone() -> None:
    """An unexpected error in placing one request is that request's; the next one is placed."""
    line, placed, is_faulty = AdmissionQueue(10), object(), False

    def place() -> Any:
        if is_faulty:
            raise ZeroDivisionError
        return None

    request = Request("0", [1], SamplingParameters(max_tokens=1, seed=1))
    groups = EligibleGroups(frozenset({"g0"}), False)
    faulty = asyncio.create_task(line.placed(request, place, lambda: groups, lambda: 0.0))
    good = asyncio.create_task(
        line.placed(request, lambda: cast(Any, placed) if is_faulty else None, lambda: groups, lambda: 1.0)
    )
    await asyncio.sleep(0)  # both come
    assert len(line) == 2
    is_faulty = True
    line.move()
    with pytest.raises(ZeroDivisionError):
        await faulty
    assert (await good)[0] is placed and not len(line)
    line.check()


async def test_a_move_of_many_tries_few() -> None:
    """A thousand requests of many lengths that no group has room for cost three tries, one for each set of groups that
    could hold them, and not a thousand."""
    ledger, line = Ledger(), AdmissionQueue(2000)

    async def come(number: int) -> None:
        length = 2 + number % 249
        request = Request(str(number), [1] * (length - 1), SamplingParameters(max_tokens=1, seed=1))
        await line.placed(
            request, lambda: ledger.place(number, length), lambda: ledger.eligible(length), lambda: length / 1000
        )

    tasks = [asyncio.create_task(come(number)) for number in range(1000)]
    await asyncio.sleep(0)
    assert len(line) == 1000 and ledger.attempts < 20
    ledger.attempts = 0
    line.move()
    assert ledger.attempts == 3
    ledger.room["small"] = 2
    line.move()
    assert ledger.attempts == 3 + 2 + 3 and [name for _, name in ledger.placed] == ["small"] * 2
    line.check()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
