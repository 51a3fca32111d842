"""A router's estimate of a group's load: the group's last report and the submissions that the report lacks."""

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse, GroupStatus
from coatcheck.proto.stubs.worker_pb2 import Load, Registration
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.load_table import LoadTable
from tests.examples import examples

REGISTRATION = Registration(model=GetModelResponse(block_size=16), num_blocks=100, max_batch_tokens=512)


def test_a_submission_counts_until_a_report_contains_it() -> None:
    """A prompt adds to the queue at once, and leaves it with the first report that contains it, however late a report
    without it comes."""
    load = GroupLoad(REGISTRATION)
    load.apply_report(Load(queued_prefill_tokens=100, status=GroupStatus(waiting=2)), now=1.0)
    load.add_submission(50)
    load.add_submission(7)
    seen = load.candidate("a")
    assert (seen.queued_prefill_tokens, seen.streams) == (157, 4)
    load.apply_report(Load(queued_prefill_tokens=90, status=GroupStatus(waiting=2)), now=60.0)
    assert load.candidate("a").queued_prefill_tokens == 147  # it was on its way for a minute
    load.apply_report(Load(queued_prefill_tokens=130, status=GroupStatus(waiting=3), submissions=1), now=60.0)
    seen = load.candidate("a")
    assert (seen.queued_prefill_tokens, seen.streams) == (137, 4)
    load.apply_report(Load(queued_prefill_tokens=137, status=GroupStatus(waiting=4), submissions=2), now=60.0)
    seen = load.candidate("a")
    assert (seen.queued_prefill_tokens, seen.streams) == (137, 4)
    load.check()


def test_requests_of_other_routers_are_those_that_this_one_did_not_send() -> None:
    """A group that gets 30 requests a second, 10 of them from this router, gets one from others in the mean age of a
    report, 0.05 s. With one router the figure is exactly 0."""
    for others, expected in ((20, 1.0), (0, 0.0)):
        load = GroupLoad(REGISTRATION)
        for second in range(100):
            load.apply_report(Load(submissions=10 * second, all_submissions=(10 + others) * second), now=float(second))
        assert load.candidate("a").unseen_requests == pytest.approx(expected, abs=0.01)
    assert load.candidate("a").unseen_requests == 0


def test_free_blocks_are_those_registered_until_the_first_report() -> None:
    """Free and evictable blocks are counted in tokens."""
    load = GroupLoad(REGISTRATION)
    assert load.candidate("a").free_tokens == 1600
    load.apply_report(
        Load(status=GroupStatus(blocks_total=100, blocks_used=30, blocks_cached=60, restore_tokens_per_second=9)),
        now=1.0,
    )
    seen = load.candidate("a")
    assert (seen.free_tokens, seen.evictable_tokens, seen.max_batch_tokens, seen.restore_tokens_per_second) == (
        160,
        960,
        512,
        9,
    )


def test_the_busy_share_follows_the_reported_prefill_seconds() -> None:
    """The busy share rises while a group computes prompts, and falls when it stops."""
    load = GroupLoad(REGISTRATION)
    load.apply_report(Load(prefill_seconds=1000.0), now=0.0)
    assert load.candidate("a").busy_share == 0.0  # what was before is not known to be lately
    for second in range(1, 301):
        load.apply_report(Load(prefill_seconds=1000.0 + 0.8 * second), now=float(second))
    assert load.candidate("a").busy_share == pytest.approx(0.8, abs=0.01)
    for second in range(301, 601):
        load.apply_report(Load(prefill_seconds=1240.0), now=float(second))
    assert load.candidate("a").busy_share < 0.01


def test_room_follows_slots_taken_and_freed_between_reports() -> None:
    """A slot that is taken or becomes free between reports counts at once. A refusal makes the group full until its
    next report."""
    load = GroupLoad(Registration(max_num_seqs=4))  # and four may be ready
    load.apply_report(Load(status=GroupStatus(running=4)), now=0.0)
    sent = [load.add_submission(1) for _ in range(4)]
    assert not load.has_room
    for number in sent:
        load.record_first_output(number)
    assert not load.has_room
    load.end_choices(sent[0])
    assert load.has_room
    load.add_submission(1)
    assert not load.has_room
    load.apply_report(Load(status=GroupStatus()), now=1.0)
    assert load.has_room
    load.record_refusal()
    assert load.is_full and not load.has_room
    load.apply_report(Load(status=GroupStatus()), now=2.0)
    assert load.has_room


def test_a_request_counts_with_all_of_its_choices_until_each_has_ended() -> None:
    """Each choice counts, in the queue and running, until it ends."""
    load = GroupLoad(Registration(max_num_seqs=4))  # and four may be ready
    request = load.add_submission(10, choices=3)
    assert load.candidate("a").streams == 3
    load.end_choices(request)
    assert (load.candidate("a").streams, load.candidate("a").queued_prefill_tokens) == (2, 10)
    load.record_first_output(request)
    assert (load.candidate("a").streams, load.candidate("a").queued_prefill_tokens) == (2, 0)
    load.end_choices(request, 2)
    assert load.candidate("a").streams == 0
    whole = load.add_submission(10, choices=2)
    load.end_choices(whole)
    load.end_choices(whole)
    load.record_first_output(whole)
    assert load.candidate("a") == GroupLoad(Registration(max_num_seqs=4)).candidate("a")
    load.check()


def test_a_group_returns_only_what_other_routers_have_overtaken() -> None:
    """The limit is the predicted queue plus 0.02 s of work, and there is none while this router alone sends."""
    load = GroupLoad(REGISTRATION)
    rate = GroupStatus(prefill_tokens_per_second=5000.0)
    load.apply_report(Load(status=rate, submissions=3, all_submissions=3), now=0.0)
    load.apply_report(Load(status=rate, submissions=4, all_submissions=4), now=1.0)
    assert load.max_queued_tokens(700.0) is None
    load.apply_report(Load(status=rate, submissions=4, all_submissions=9), now=2.0)
    assert load.max_queued_tokens(700.0) == 800
    for second in range(3, 123):  # the other router has left
        load.apply_report(Load(status=rate, submissions=4, all_submissions=9), now=float(second))
    assert load.max_queued_tokens(700.0) is None


def test_a_return_replaces_the_reported_queue() -> None:
    """The queue that comes with a return contains this router's earlier submissions, which are counted once, and not
    its later ones."""
    load = GroupLoad(REGISTRATION)
    load.apply_report(Load(queued_prefill_tokens=100), now=0.0)
    load.add_submission(30)
    returned = load.add_submission(50)
    load.add_submission(7)
    load.record_return(returned, 4030)
    load.end_choices(returned)
    assert load.candidate("a").queued_prefill_tokens == 4000 + 30 + 7
    load.apply_report(Load(queued_prefill_tokens=200, submissions=3), now=0.1)
    assert load.candidate("a").queued_prefill_tokens == 200
    load.check()


SLOTS, MAX_WAITING = 2, 4


class OneStream(RuleBasedStateMachine):
    """A router and a group, with messages on their way in both directions for as long as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LoadTable()
        self.load = GroupLoad(Registration(max_num_seqs=SLOTS), self.table, 2)
        self.had_room = True
        self.sent: dict[int, int] = {}  # id -> number in the load
        self.last_id = 0
        self.down: deque[tuple[str, int]] = deque()
        self.up: deque[tuple[str, int] | Load] = deque()
        self.unread: list[int] = []  # have begun, and their readers have not noticed
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.taken = 0

    @precondition(lambda self: self.load.has_room)
    @rule(most=st.sampled_from([1, 100]))
    def submit(self, most: int) -> None:
        for _ in range(most):
            if self.load.has_room:
                self.last_id += 1
                self.sent[self.last_id] = self.load.add_submission(1)
                self.down.append(("submit", self.last_id))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.sent)))
        self.load.end_choices(self.sent.pop(id))
        self.down.append(("abort", id))

    @precondition(lambda self: self.down)
    @rule(most=st.sampled_from([1, 100]))
    def group_takes(self, most: int) -> None:
        for _ in range(min(most, len(self.down))):
            kind, id = self.down.popleft()
            if kind == "submit":
                self.taken += 1
                self.waiting.append(id)
            else:
                self.waiting = [other for other in self.waiting if other != id]
                self.running = [other for other in self.running if other != id]

    @precondition(lambda self: self.waiting and len(self.running) < SLOTS)
    @rule()
    def group_begins(self) -> None:
        id = self.waiting.pop(0)
        self.running.append(id)
        self.up.append(("begins", id))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def group_ends(self, data: st.DataObject) -> None:
        id = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.up.append(("ends", id))

    @rule()
    def group_reports(self) -> None:
        status = GroupStatus(running=len(self.running), waiting=len(self.waiting))
        self.up.append(Load(status=status, submissions=self.taken))

    @precondition(lambda self: self.up)
    @rule()
    def router_hears(self) -> None:
        message = self.up.popleft()
        if isinstance(message, Load):
            self.load.apply_report(message, now=0.0)
        elif message[0] == "begins":
            self.unread.append(message[1])
        elif message[1] in self.sent:
            self.load.end_choices(self.sent.pop(message[1]))

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def reader_notices(self, data: st.DataObject) -> None:
        id = self.unread.pop(data.draw(st.integers(0, len(self.unread) - 1)))
        if id in self.sent:
            self.load.record_first_output(self.sent[id])

    @invariant()
    def holds(self) -> None:
        self.load.check()  # the table has the same figures
        assert self.table.has_room.tolist()[:3] == [False, False, self.load.has_room]
        assert self.table.gained_room or self.had_room or not self.load.has_room, "room that nobody learns of"
        self.table.gained_room, self.had_room = False, self.load.has_room
        assert len(self.waiting) + len(self.running) <= SLOTS + MAX_WAITING, "the group has more than it has room for"

    def teardown(self) -> None:
        """Once all messages have arrived the estimate equals the group's load."""
        self.group_takes(len(self.down))
        self.group_reports()
        while self.up:
            self.router_hears()
        seen = self.load.candidate("a")
        assert seen.streams == len(self.waiting) + len(self.running)
        self.holds()


TestOneStream = OneStream.TestCase
TestOneStream.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)
