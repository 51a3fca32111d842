"""Chunks of a snapshot and the events between them give a router's index the same blocks as a whole snapshot."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.cache_snapshot import CacheSnapshot
from coatcheck.workers.service.message_conversion import chunk_message, event_messages
from tests.examples import examples
from tests.workers.collector import request
from tests.workers.kv.two_tier_engine import make_engine

NUM_BLOCKS, HOST_BLOCKS = 16, 12


class Stream:
    """What one router gets of an engine, and the index that it makes of that."""

    def __init__(self, engine: Engine) -> None:
        self.index = new_index()
        self.snapshot: CacheSnapshot | None = None
        self.has_gap = False  # an event was lost, and the router has not seen a later one
        self._engine = engine
        self._sequence = 0

    def step(self, *, is_lost: bool) -> None:
        """Step the engine, and send its events unless they are lost."""
        events = self._engine.step().events
        for message in event_messages("1", self._sequence, events):
            self.has_gap = self.has_gap or is_lost
            if not is_lost:
                self.has_gap = False
                outcome = self.index.apply_events("g", message.events)
                assert outcome is not EventOutcome.IMPOSSIBLE
                if outcome is EventOutcome.SNAPSHOT_NEEDED:
                    self.snapshot = None
        self._sequence += len(events)

    def send_chunk(self, blocks: int) -> None:
        """Send the next chunk, or the first one of a new snapshot. After the last chunk nothing is sent."""
        if self.snapshot is not None and self.snapshot.is_complete:
            return
        is_first = self.snapshot is None
        if self.snapshot is None:
            self.snapshot = self._engine.begin_snapshot()
        events = self.snapshot.read_chunk(blocks)
        message = chunk_message("1", self._sequence, events, first=is_first, last=self.snapshot.is_complete)
        outcome = self.index.apply_snapshot("g", message.snapshot)
        self.has_gap = False
        assert outcome in (EventOutcome.APPLIED, EventOutcome.SNAPSHOT_NEEDED)
        if outcome is EventOutcome.SNAPSHOT_NEEDED:
            self.snapshot = None


def new_index() -> PrefixIndex:
    index = PrefixIndex()
    index.add_group("g", "1", NUM_BLOCKS + HOST_BLOCKS)
    return index


def blocks_of(index: PrefixIndex) -> list[set[bytes]]:
    """The blocks on the device and on the host."""
    index.check()
    tables = index._locations.groups_by_block
    return [{block for block, groups in table.items() if groups & index._live} for table in tables]


def blocks_of_whole_snapshot(engine: Engine) -> list[set[bytes]]:
    """The blocks in the index of a router that gets all of them at once."""
    snapshot, events = engine.begin_snapshot(), []
    while not snapshot.is_complete:
        events += snapshot.read_chunk(NUM_BLOCKS + HOST_BLOCKS)
    index = new_index()
    message = chunk_message("1", 0, events, first=True, last=True)
    assert index.apply_snapshot("g", message.snapshot) is EventOutcome.APPLIED
    return blocks_of(index)


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 5), st.integers(4, 44)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("lose"), st.just(1)),
    st.tuples(st.just("chunk"), st.integers(1, 4)),
    st.tuples(st.just("restart"), st.just(1)),
)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 1), st.lists(ACTIONS, min_size=10, max_size=60))
def test_chunks_and_events_are_as_good_as_a_whole_snapshot(depth: int, actions: list[tuple[object, ...]]) -> None:
    """Prompts that share prefixes fill two small tiers, which evict and copy, while a snapshot is sent in chunks,
    events are lost, and snapshots begin again. The index never has a block that is not held, and in the end all."""
    engine, _ = make_engine(NUM_BLOCKS, HOST_BLOCKS, depth=depth, delays=[0, 2])
    stream = Stream(engine)
    for number, (kind, *arguments) in enumerate(actions):
        count = int(str(arguments[0]))
        if kind == "submit":
            prompt = [count] * int(str(arguments[1]))
            engine.submit_request(request(f"r{number}", prompt, 6))
        elif kind == "chunk":
            stream.send_chunk(count)
        elif kind == "restart":
            stream.snapshot = None
        else:
            for _ in range(count):
                stream.step(is_lost=kind == "lose")
        if kind != "lose":
            held = blocks_of_whole_snapshot(engine)
            if not stream.has_gap:
                assert all(known <= real for known, real in zip(blocks_of(stream.index), held, strict=True))
    while engine.has_work:
        stream.step(is_lost=False)
        stream.send_chunk(2)
    if stream.has_gap:  # no later event tells the router of it: it asks by itself
        stream.snapshot = None
        stream.send_chunk(2)
    while not stream.index.is_complete("g"):
        stream.send_chunk(2)
    assert blocks_of(stream.index) == blocks_of_whole_snapshot(engine)


def test_evictions_leave_no_gap_on_the_device() -> None:
    """A group evicts the last blocks of a prompt first, and names their parents. So each prefix on its device is whole,
    and a router finds the ends of prefixes by bisection."""
    rng = random.Random(3)
    engine, _ = make_engine(NUM_BLOCKS, 0, depth=1, delays=[0, 2])
    stream = Stream(engine)
    stream.send_chunk(NUM_BLOCKS)
    removed = 0
    for number in range(200):
        if rng.random() < 0.4:
            prompt = [rng.randint(1, 3)] * rng.randint(2, 10) + [rng.randint(1, 5)] * rng.randint(2, 40)
            engine.submit_request(request(f"r{number}", prompt, 6))
        before = stream.index.entries
        stream.step(is_lost=False)
        removed += max(before - stream.index.entries, 0)
        stream.index.check()
        assert not any(map(len, stream.index._locations.gaps))
    assert removed, "nothing was evicted"
