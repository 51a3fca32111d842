"""FairQueue: shares follow weights, priorities are kept, no request starves, and the size is bounded."""

import math
import random
from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.router.access.tenant import Tenant
from coatcheck.router.serving.fair_queue import FairQueue, QueueEntry, QueueFull, TokenCharge
from tests.examples import examples

HEAVY, LIGHT, OTHER = Tenant("heavy", weight=3), Tenant("light", weight=1), Tenant("other", weight=0.5)


@dataclass(eq=False, kw_only=True)
class Waiting(QueueEntry):
    """A request with a name."""

    name: Any


class Queue(FairQueue[Waiting]):
    """Requests are put and taken by name."""

    def put(self, name: Any, tenant: Tenant, *, bounded: bool = True, **order: Any) -> Waiting:
        """Adds a request and returns it. `order`: fields of QueueEntry."""
        entry = Waiting(name=name, tenant=tenant, **order)
        self.add(entry, bounded=bounded)
        return entry

    def take(self, blocked: AbstractSet[Hashable] = frozenset()) -> Any:
        """The name of the next request, which is removed."""
        return self.pop(blocked)[0].name


@pytest.mark.parametrize("flood", [1, 10])
def test_shares_follow_weights_under_a_flood(flood: int) -> None:
    """While both tenants wait, served tokens are divided by weight, for any number and length of requests, also if the
    estimates are wrong."""
    rng = random.Random(flood)
    queue = Queue(10_000)
    served = {"heavy": 0, "light": 0}

    def put(tenant: Tenant) -> None:
        queue.put(tenant, tenant, tokens=100)

    for _ in range(50):
        put(HEAVY)
        for _ in range(flood):
            put(LIGHT)
    running: list[tuple[Tenant, TokenCharge, int]] = []
    for _ in range(4000):
        entry, charged = queue.pop()
        tenant = entry.tenant
        running.append((tenant, charged, rng.randint(1, 50) if tenant is HEAVY else rng.randint(100, 900)))
        if len(running) > 8:
            done, receipt, took = running.pop(0)
            receipt.settle_tokens(took)
            served[done.name] += took
        put(tenant)
    queue.check()
    assert served["heavy"] / sum(served.values()) == pytest.approx(0.75, rel=0.1)


def test_a_tenant_saves_up_no_credit_in_a_pause() -> None:
    """A tenant that returns from a pause gets its share, and not everything until it has caught up."""
    queue = Queue(1000)
    even = Tenant("even")
    for _ in range(100):
        queue.put("light", LIGHT, tokens=10)
    for _ in range(50):
        queue.pop()
    for _ in range(50):
        queue.put("even", even, tokens=10)
    taken = [queue.take() for _ in range(40)]
    assert 15 <= taken.count("even") <= 25


def test_urgent_requests_go_first_and_no_priority_starves() -> None:
    """Lower priority values go first. One of eight requests is taken whatever its priority, so that a flood of urgent
    ones starves none."""
    queue = Queue(1000)
    queue.put(9, LIGHT, priority=9)
    for priority in (2, 1, 0, 2, 1, 0):
        queue.put(priority, LIGHT, priority=priority)
    assert [queue.take() for _ in range(4)] == [0, 0, 1, 1]
    taken = []
    for _ in range(10):
        queue.put(0, HEAVY, priority=0)
        taken.append(queue.take())
    assert 9 in taken


def test_the_first_due_of_a_tenant_is_next() -> None:
    """Among one tenant's requests of one priority the one that is due first is next; equal due times go in order of
    age."""
    queue = Queue(1000)
    for name, due in (("long", 30.0), ("short", 5.0), ("short too", 5.0), ("late", 40.0)):
        queue.put(name, LIGHT, due=due)
    assert (
        queue.count_ahead(LIGHT, 0, math.inf) == 4
        and queue.count_ahead(LIGHT, 0, 5.0) == 2
        and queue.count_ahead(LIGHT, 0, 4.9) == 0
    )
    assert queue.remove(queue.put("dropped", LIGHT, due=1.0))
    following, oldest = queue.peek(), queue.oldest()
    assert following is not None and following.name == "short"
    assert oldest is not None and oldest.name == "long", "the oldest request is not the next one"
    assert [queue.take() for _ in range(4)] == ["short", "short too", "long", "late"]
    assert queue.oldest() is None


def test_a_full_queue_displaces_the_tenant_with_the_most_requests() -> None:
    """A full queue accepts a request of a tenant with few requests in place of one of the tenant with the most per
    weight. That tenant itself gets in only with a more urgent request."""
    queue = Queue(4)
    a, b, c, d = (queue.put(name, LIGHT) for name in "abcd")
    assert not queue.has_room(LIGHT, 0)
    with pytest.raises(QueueFull):
        queue.put("e", LIGHT)
    assert queue.add(Waiting(name="f", tenant=HEAVY)) is d
    assert queue.add(Waiting(name="urgent", tenant=LIGHT, priority=-1)) is c
    queue.put("accepted before", LIGHT, bounded=False)
    assert queue.remove(a) and queue.remove(b) and not queue.remove(c) and not queue.remove(d)
    assert len(queue) == 3


def test_blocked_classes_are_skipped_and_keep_their_place() -> None:
    """While one tenant's class is blocked the other tenant's requests are taken. Then the skipped ones are first, were
    not charged, and keep their order and priorities."""
    queue = Queue(1000)
    even = Tenant("even")
    for number in range(3):
        queue.put(f"long {number}", even, tokens=10, due=3.0 - number, scheduling_class="large")
        queue.put(f"urgent {number}", even, priority=-1, tokens=10, scheduling_class="large")
    for number in range(100):
        queue.put(f"short {number}", LIGHT, tokens=10, scheduling_class="any")
    blocked = {"large"}
    assert [queue.take(blocked) for _ in range(40)] == [f"short {number}" for number in range(40)]
    assert queue.peek({"large", "any"}) is None
    queue.check()
    taken = [queue.take() for _ in range(7)]
    assert [name for name in taken if name.startswith("urgent")] == ["urgent 0", "urgent 1", "urgent 2"]
    assert [name for name in taken if name.startswith("long")] == ["long 2", "long 1", "long 0"]


def test_a_returning_tenant_does_not_start_at_a_blocked_tenants_virtual_time() -> None:
    """A tenant's virtual time stands still while its requests are blocked. A third tenant that comes then starts at the
    virtual time of the tenant that is served, and gets only its share."""
    queue = Queue(1000)
    queue.put("long", HEAVY, scheduling_class="large")
    for _ in range(200):
        queue.put("light", LIGHT, tokens=10, scheduling_class="any")
    for _ in range(100):
        queue.pop({"large"})
    for _ in range(50):
        queue.put("even", Tenant("even"), tokens=10, scheduling_class="any")
    taken = [queue.take({"large"}) for _ in range(40)]
    assert 15 <= taken.count("even") <= 25


def test_classes_may_change_while_requests_wait() -> None:
    """After `reclassify` all requests keep their place."""
    queue = Queue(1000)
    for number in range(6):
        queue.put(number, LIGHT, due=float(number), scheduling_class="any")
    queue.reclassify(lambda entry: "even" if entry.due % 2 == 0 else "odd")
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
    assert queue.take({"even"}) == 1
    assert [queue.take() for _ in range(5)] == [0, 2, 3, 4, 5]


CLASSES = st.sampled_from(["any", "large", "begun"])


class AnyCalls(RuleBasedStateMachine):
    """Any order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(6)
        self.waiting: list[Waiting] = []
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
        """An accepted request waits, a displaced one does not."""
        self.made += 1
        entry = Waiting(
            name=self.made,
            tenant=tenant,
            priority=priority,
            tokens=tokens,
            due=due,
            scheduling_class=scheduling_class,
        )
        if bounded and not self.queue.has_room(tenant, priority):
            with pytest.raises(QueueFull):
                self.queue.add(entry)
            return
        displaced = self.queue.add(entry, bounded=bounded)
        self.waiting.append(entry)
        if displaced is not None:
            self.waiting.remove(displaced)

    @precondition(lambda self: self.waiting)
    @rule(took=st.integers(0, 200), blocked=st.sets(CLASSES))
    def take(self, took: int, blocked: set[str]) -> None:
        """`pop` takes the request that `peek` returns, of a class that is not blocked; no other of its tenant and
        priority is due before."""
        rivals = [entry for entry in self.waiting if entry.scheduling_class not in blocked]
        expected = self.queue.peek(blocked)
        assert (expected is None) == (not rivals)
        if expected is None:
            return
        taken, served = self.queue.pop(blocked)
        assert taken is expected and taken in rivals
        assert all(
            (taken.due, taken.id) <= (other.due, other.id)
            for other in rivals
            if (other.tenant, other.priority) == (taken.tenant, taken.priority)
        )
        self.waiting.remove(taken)
        served.settle_tokens(took)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A removed request no longer waits."""
        entry = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.queue.remove(entry)
        assert not self.queue.remove(entry)

    @rule(scheduling_class=st.lists(CLASSES, min_size=1))
    def reclassify(self, scheduling_class: list[str]) -> None:
        """The classes change, the order does not."""

        before = self.queue.peek()
        self.queue.reclassify(lambda entry: scheduling_class[entry.id % len(scheduling_class)])
        assert self.queue.peek() is before

    @invariant()
    def sound(self) -> None:
        """The queue contains the waiting requests."""
        self.queue.check()
        assert len(self.queue) == len(self.waiting)


TestQueue = AnyCalls.TestCase
TestQueue.settings = settings(max_examples=examples(40), deadline=None)
