"""PrefixIndex compared with a model of plain sets, and its predictions with what an engine finds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import (
    TIER_DEVICE,
    TIER_HOST,
    TIER_STATE,
    KvEvents,
    SnapshotChunk,
    Tier,
)
from coatcheck.router.groups.request import Request
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from coatcheck.workers.service.message_conversion import chunk_message, event_messages
from tests.examples import examples
from tests.router.routing.index_events import CHAIN, matched_blocks, removed, stored
from tests.workers.collector import make_engine, request

pytestmark = pytest.mark.usefixtures("slow_removal", "early_split")

TIERS = st.sampled_from([TIER_DEVICE, TIER_HOST, TIER_STATE])
FAKE_MODEL = GetModelResponse(name="fake", fingerprint="fake", block_size=4)
NAMES = st.sampled_from(["a", "b", "c"])
KEEPS_STATES = "c"  # TIER_STATE of other groups is ignored


class IndexAgainstSets(RuleBasedStateMachine):
    """The same events into the index and into plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.epochs: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.held: dict[str, set[tuple[int, Tier]] | None] = {}  # None: waiting for a snapshot
        self.complete: set[str] = set()  # groups whose snapshot has ended
        self.requested: set[str] = set()  # groups that were asked for a snapshot, after a gap
        self.sent: list[tuple[int, str, int, int]] = []  # key, group, number of blocks and snapshot_at of a prompt
        self.removed: list[tuple[int, str, int, int]] = []  # prompts that were removed, or whose group has gone since
        self.count = 0

    @rule(group=NAMES)
    def register(self, group: str) -> None:
        self.count += 1
        self.epochs[group], self.sequences[group], self.held[group] = self.count, 0, None
        self.index.add_group(group, str(self.count), keeps_states=group == KEEPS_STATES)
        self.forget_sent(group)
        self.forget_snapshot(group)

    @rule(group=NAMES)
    def attach_again(self, group: str) -> None:
        """A new stream to the same process: the epoch stays, and expected blocks are lost."""
        if group in self.epochs:
            self.held[group] = None
            self.index.add_group(group, str(self.epochs[group]), keeps_states=group == KEEPS_STATES)
            self.forget_sent(group)
            self.forget_snapshot(group)

    def forget_sent(self, group: str) -> None:
        self.removed += [prompt for prompt in self.sent if prompt[1] == group]
        self.sent = [prompt for prompt in self.sent if prompt[1] != group]

    def forget_snapshot(self, group: str) -> None:
        self.complete.discard(group)
        self.requested.discard(group)

    @rule(group=NAMES)
    def leave(self, group: str) -> None:
        self.index.remove_group(group)
        self.forget_sent(group)
        self.forget_snapshot(group)
        for known in (self.epochs, self.sequences, self.held):
            known.pop(group, None)

    @rule(group=NAMES, blocks=st.integers(0, len(CHAIN)), snapshot_at=st.integers(0, len(CHAIN)))
    def send_prompt(self, group: str, blocks: int, snapshot_at: int) -> None:
        self.count += 1
        snapshot_at = min(snapshot_at, blocks)
        self.index.add_expected(group, self.count, CHAIN[:blocks], snapshot_at)
        if group in self.epochs:
            self.sent.append((self.count, group, blocks, snapshot_at))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def remove_expected(self, data: st.DataObject) -> None:
        prompt = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.index.remove_expected(prompt[1], prompt[0])
        self.removed.append(prompt)

    @precondition(lambda self: self.removed)
    @rule(data=st.data())
    def remove_expected_too_late(self, data: st.DataObject) -> None:
        key, group, _, _ = data.draw(st.sampled_from(self.removed))
        self.index.remove_expected(group, key)

    @rule(group=NAMES, blocks=st.sets(st.tuples(st.integers(0, 5), TIERS)), first=st.booleans(), last=st.booleans())
    def send_chunk(self, group: str, blocks: set[tuple[int, Tier]], first: bool, last: bool) -> None:
        """A chunk of a snapshot. Events may have come since the chunk before, or that chunk may never have come."""
        if group not in self.epochs:
            return
        events = [stored(block, tier) for block, tier in sorted(blocks)]
        epoch, sequence = str(self.epochs[group]), self.sequences[group]
        chunk = SnapshotChunk(epoch=epoch, sequence=sequence, events=events, first=first, last=last)
        outcome = self.index.apply_snapshot(group, chunk)
        if first:
            self.held[group] = set()
            self.forget_snapshot(group)
        held = self.held[group]
        if held is None:
            expected = EventOutcome.IGNORED if group in self.requested else EventOutcome.SNAPSHOT_NEEDED
            self.requested.add(group)
        else:
            expected = EventOutcome.APPLIED
            held.update(block for block in blocks if group == KEEPS_STATES or block[1] != TIER_STATE)
            (self.complete.add if last else self.complete.discard)(group)
        assert outcome is expected

    @rule(group=NAMES, events=st.lists(st.tuples(st.booleans(), st.integers(0, 5), TIERS), min_size=1, max_size=5))
    def send_events(self, group: str, events: list[tuple[bool, int, Tier]]) -> None:
        if group not in self.epochs:
            return
        messages = [stored(block, tier) if store else removed(block, tier) for store, block, tier in events]
        message = KvEvents(epoch=str(self.epochs[group]), sequence=self.sequences[group], events=messages)
        outcome = self.index.apply_events(group, message)
        self.sequences[group] += len(events)
        held = self.held[group]
        if held is None:
            assert outcome is EventOutcome.IGNORED
            return
        for store, block, tier in events:
            if group == KEEPS_STATES or tier != TIER_STATE:
                (held.add if store else held.discard)((block, tier))

    @rule(group=NAMES)
    def lose_some(self, group: str) -> None:
        if group in self.epochs:
            self.sequences[group] += 1
            message = KvEvents(epoch=str(self.epochs[group]), sequence=self.sequences[group], events=[stored(0)])
            expected = EventOutcome.IGNORED if self.held[group] is None else EventOutcome.SNAPSHOT_NEEDED
            assert self.index.apply_events(group, message) is expected
            if expected is EventOutcome.SNAPSHOT_NEEDED:
                self.requested.add(group)
            self.complete.discard(group)
            self.held[group] = None

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        expected = {}
        for group, held in self.held.items():
            counts = [0, 0, 0]
            coming = max((blocks for _, name, blocks, _ in self.sent if name == group), default=0)
            for block in range(len(CHAIN)):
                if (block, TIER_DEVICE) in (held or ()):
                    counts[0] += 1
                elif (block, TIER_HOST) in (held or ()):
                    counts[1] += 1
                elif block < coming:
                    counts[2] += 1
                else:
                    break
            if group == KEEPS_STATES:
                saved = {block + 1 for block, tier in held or () if tier == TIER_STATE}
                coming_at = saved | {snapshot_at for _, name, _, snapshot_at in self.sent if name == group}
                start = max((at for at in saved if at <= counts[0]), default=0)
                counts = [start, 0, max((at for at in coming_at if at <= sum(counts)), default=0) - start]
            if any(counts):
                expected[group] = tuple(counts)
        assert matched_blocks(self.index, CHAIN) == expected
        assert {group for group in self.epochs if self.index.is_complete(group)} == self.complete
        blocks = [tier for held in self.held.values() for _, tier in held or () if tier != TIER_STATE]
        assert self.index.entries == len(blocks)


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=examples(30), deadline=None)


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), num_blocks=st.integers(60, 120), snapshots=st.integers(1, 4))
def test_what_is_predicted_of_a_group_with_states_is_found(
    data: st.DataObject, num_blocks: int, snapshots: int
) -> None:
    """Prompts that come one after another, while KV and snapshots are evicted: a router that applies the events
    predicts exactly the cached tokens that the group reports, and so does one that attaches later."""
    engine, _ = make_engine(num_blocks, snapshots=snapshots)
    stems = [[5] * 70, [6] * 68, [5] * 34 + [7] * 50]
    index = PrefixIndex()
    index.add_group("a", "e", num_blocks, 4, keeps_states=True)
    index.apply_snapshot("a", SnapshotChunk(epoch="e", first=True, last=True))
    sequence = 0
    for i in range(data.draw(st.integers(2, 8))):
        prompt = data.draw(st.sampled_from(stems)) + data.draw(st.lists(st.integers(1, 3), max_size=2)) * 12
        chain = Request("r", prompt, SamplingParams(max_tokens=1, seed=1)).block_hashes(FAKE_MODEL)
        late = PrefixIndex()
        late.add_group("a", "e", num_blocks, 4, keeps_states=True)
        held = engine.begin_snapshot()
        while not held.is_complete:
            chunk = chunk_message("e", sequence, held.read_chunk(10_000), first=late.events == 0, last=False)
            assert late.apply_snapshot("a", chunk.snapshot) is EventOutcome.APPLIED
        predicted = 4 * int(index.match(chain).device[0])
        assert late.match(chain).device.tolist() == index.match(chain).device.tolist()
        engine.submit_request(request(f"r{i}", prompt, data.draw(st.integers(1, 9))))
        while engine.has_work:
            output = engine.step()
            for message in event_messages("e", sequence, output.events):
                assert index.apply_events("a", message.events) is EventOutcome.APPLIED
            sequence += len(output.events)
            found = [one.cached_device_tokens for one in output.outputs if one.cached_device_tokens >= 0]
            assert all(tokens == predicted for tokens in found)
        index.check()
        late.check()
