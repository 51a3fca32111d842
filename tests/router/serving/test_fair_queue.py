"""The queue is fair by weight, keeps priorities, starves nobody, and is bounded."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.router.access.tenant import Tenant
from coatcheck.router.serving.fair_queue import FairQueue, TokenCharge

HEAVY, LIGHT, OTHER = Tenant("heavy", weight=3), Tenant("light", weight=1), Tenant("other", weight=0.5)


@pytest.mark.parametrize("flood", [1, 10])
def test_shares_follow_weights_under_a_flood(flood: int) -> None:
    """While both always wait, tokens served divide by weight, however many of one wait and however long each is, also
    when the guess of what a request takes is wrong."""
    rng = random.Random(flood)
    queue: FairQueue[Tenant] = FairQueue(10_000)
    served = {"heavy": 0, "light": 0}

    def put(tenant: Tenant) -> None:
        assert queue.add(tenant, tenant, tokens=100)

    for _ in range(50):
        put(HEAVY)
        for _ in range(flood):
            put(LIGHT)
    running: list[tuple[Tenant, TokenCharge, int]] = []
    for _ in range(4000):
        tenant, charged = queue.pop()
        running.append((tenant, charged, rng.randint(1, 50) if tenant is HEAVY else rng.randint(100, 900)))
        if len(running) > 8:
            done, receipt, took = running.pop(0)
            receipt.settle_tokens(took)
            served[done.name] += took
        put(tenant)
    queue.check()
    assert served["heavy"] / sum(served.values()) == pytest.approx(0.75, rel=0.1)


def test_a_pause_saves_nothing_up() -> None:
    """A tenant that was away while another was served does not then have everything until it has caught up."""
    queue: FairQueue[str] = FairQueue(1000)
    even = Tenant("even")
    for _ in range(100):
        queue.add("light", LIGHT, tokens=10)
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.add("even", even, tokens=10)
    taken = [queue.pop()[0] for _ in range(40)]
    assert 15 <= taken.count("even") <= 25


def test_the_urgent_go_first_and_the_others_still_go() -> None:
    """Lower priorities go first; of a few one is the oldest, so that a flood of urgent ones starves nobody."""
    queue: FairQueue[int] = FairQueue(1000)
    queue.add(9, LIGHT, priority=9)
    for priority in (2, 1, 0, 2, 1, 0):
        queue.add(priority, LIGHT, priority=priority)
    assert [queue.pop()[0] for _ in range(4)] == [0, 0, 1, 1]
    taken = []
    for _ in range(10):
        queue.add(0, HEAVY, priority=0)
        taken.append(queue.pop()[0])
    assert 9 in taken


def test_the_first_due_of_a_tenant_is_next() -> None:
    """Among one tenant's of one priority whoever is due first goes first, and of those due together the oldest; others'
    shares stay what they are."""
    queue: FairQueue[str] = FairQueue(1000)
    for name, due in (("long", 30.0), ("short", 5.0), ("short too", 5.0), ("late", 40.0)):
        queue.add(name, LIGHT, due=due)
    assert (
        queue.count_ahead(LIGHT, 0, math.inf) == 4
        and queue.count_ahead(LIGHT, 0, 5.0) == 2
        and queue.count_ahead(LIGHT, 0, 4.9) == 0
    )
    placed = queue.add("dropped", LIGHT, due=1.0)
    assert placed is not None and queue.remove(placed[0])
    assert queue.peek() == "short" and queue.oldest() == "long", "who waits longest is not who is next"
    assert [queue.pop()[0] for _ in range(4)] == ["short", "short too", "long", "late"]
    assert queue.oldest() is None


def test_who_fills_the_queue_gives_way() -> None:
    """A full queue takes in a tenant that has little in it, at the cost of whoever has most for its weight; it takes
    no more of the latter, but for what is more urgent."""
    queue: FairQueue[str] = FairQueue(4)
    for name in "abcd":
        assert queue.add(name, LIGHT) is not None
    assert not queue.has_room(LIGHT, 0)
    assert queue.add("e", LIGHT) is None
    placed = queue.add("f", HEAVY)
    assert placed is not None and placed[1] == "d"
    placed = queue.add("urgent", LIGHT, priority=-1)
    assert placed is not None and placed[1] == "c"
    assert queue.add("accepted before", LIGHT, bounded=False) is not None
    assert (queue.stats().waiting, queue.stats().displaced, queue.stats().refused) == (5, 2, 1)


def test_blocked_classes_are_passed_over_and_keep_their_place() -> None:
    """While no group has room for one tenant's the other's are taken; then those that waited are first, and were not
    charged meanwhile. Their own order, and their priorities, stay."""
    queue: FairQueue[str] = FairQueue(1000)
    even = Tenant("even")
    for number in range(3):
        queue.add(f"long {number}", even, tokens=10, due=3.0 - number, scheduling_class="large")
        queue.add(f"urgent {number}", even, priority=-1, tokens=10, scheduling_class="large")
    for number in range(100):
        queue.add(f"short {number}", LIGHT, tokens=10, scheduling_class="any")
    blocked = {"large"}
    assert [queue.pop(blocked)[0] for _ in range(40)] == [f"short {number}" for number in range(40)]
    assert queue.peek({"large", "any"}) is None
    queue.check()
    taken = [queue.pop()[0] for _ in range(7)]
    assert [name for name in taken if name.startswith("urgent")] == ["urgent 0", "urgent 1", "urgent 2"]
    assert [name for name in taken if name.startswith("long")] == ["long 2", "long 1", "long 0"]


def test_a_returning_tenant_does_not_start_at_a_blocked_tenants_virtual_time() -> None:
    """While one tenant's are blocked its virtual time stands still: a third tenant that comes begins beside the one
    that was served meanwhile, and does not have everything until it has caught up."""
    queue: FairQueue[str] = FairQueue(1000)
    queue.add("long", HEAVY, scheduling_class="large")
    for _ in range(200):
        queue.add("light", LIGHT, tokens=10, scheduling_class="any")
    for _ in range(100):
        queue.pop({"large"})
    for _ in range(50):
        queue.add("even", Tenant("even"), tokens=10, scheduling_class="any")
    taken = [queue.pop({"large"})[0] for _ in range(40)]
    assert 15 <= taken.count("even") <= 25


def test_classes_may_change_while_requests_wait() -> None:
    """After `reclassify` all requests keep their place."""
    queue: FairQueue[int] = FairQueue(1000)
    for number in range(6):
        queue.add(number, LIGHT, due=float(number), scheduling_class="any")
    queue.reclassify(lambda number: "even" if number % 2 == 0 else "odd")
    queue.check()
    assert (
        queue.waiting_in_class("any"),
        queue.waiting_in_class("even"),
        queue.count_ahead(LIGHT, 0, 2.0, "even"),
    ) == (
        0,
        3,
        2,
    )
    assert queue.pop({"even"})[0] == 1
    assert [queue.pop()[0] for _ in range(5)] == [0, 2, 3, 4, 5]


CLASSES = st.sampled_from(["any", "large", "begun"])


class Queue(RuleBasedStateMachine):
    """Any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(6)
        self.waiting: dict[int, int] = {}  # what we put -> its id
        self.claims: dict[int, tuple[Tenant, int, float, str]] = {}
        self.made = 0

    @rule(
        tenant=st.sampled_from([HEAVY, LIGHT, OTHER]),
        priority=st.integers(-1, 1),
        tokens=st.integers(1, 99),
        due=st.sampled_from([0.0, 1.0, 2.0]),
        scheduling_class=CLASSES,
        bounded=st.booleans(),
    )
    def put(self, tenant: Tenant, priority: int, tokens: int, due: float, scheduling_class: str, bounded: bool) -> None:
        """Whoever is taken in waits, whoever is displaced does not."""
        self.made += 1
        room = self.queue.has_room(tenant, priority)
        found = self.queue.add(
            self.made,
            tenant,
            priority=priority,
            tokens=tokens,
            due=due,
            scheduling_class=scheduling_class,
            bounded=bounded,
        )
        assert (found is not None) == (room or not bounded)
        if found is not None:
            self.waiting[self.made] = found[0]
            self.claims[self.made] = (tenant, priority, due, scheduling_class)
            if found[1] is not None:
                del self.waiting[found[1]]

    @precondition(lambda self: self.waiting)
    @rule(took=st.integers(0, 200), blocked=st.sets(CLASSES))
    def take(self, took: int, blocked: set[str]) -> None:
        """Who is next of those that are not blocked is who is taken, once, and nobody of them of the same tenant and
        priority was due before. All are blocked, or somebody is next."""
        rivals = [claim for what in self.waiting if (claim := self.claims[what])[3] not in blocked]
        expected = self.queue.peek(blocked)
        assert (expected is None) == (not rivals)
        if expected is None:
            return
        taken, served = self.queue.pop(blocked)
        assert taken == expected and taken in self.waiting
        tenant, priority, due, scheduling_class = self.claims[taken]
        assert scheduling_class not in blocked
        assert all(due <= other[2] for other in rivals if other[:2] == (tenant, priority))
        del self.waiting[taken]
        served.settle_tokens(took)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Whoever leaves is gone."""
        what = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(self.waiting[what])
        assert not self.queue.remove(self.waiting.pop(what))

    @rule(scheduling_class=st.lists(CLASSES, min_size=1))
    def reclassify(self, scheduling_class: list[str]) -> None:
        """Classes change, places do not."""

        def changed(what: int) -> str:
            return scheduling_class[what % len(scheduling_class)]

        before = self.queue.peek()
        self.queue.reclassify(changed)
        assert self.queue.peek() == before
        self.claims = {what: (*claim[:3], changed(what)) for what, claim in self.claims.items()}

    @invariant()
    def sound(self) -> None:
        """It holds what it was given."""
        self.queue.check()
        assert len(self.queue) == len(self.waiting)


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, deadline=None)
