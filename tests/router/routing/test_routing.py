"""Routing end to end: events in, placement out, and an index that heals itself."""

from coatcheck.proto.block_hash import block_key, hash_chain
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.proto.stubs.worker_pb2 import TIER_DEVICE, KvEvent, KvEvents
from coatcheck.router.routing.event_trouble import EventProblem
from tests.router.door import Door, OpenDoor
from tests.router.fake_group import FakeGroup

PROMPT = list(range(100, 140))


def blocks(salt: str = "") -> list[KvEvent]:
    """The prompt's blocks, as a group that has computed it would report them."""
    chain = hash_chain(block_key(salt=salt, model="tiny", fingerprint="weights"), PROMPT, 4)
    return [
        KvEvent(stored=True, block_hash=block, parent_hash=parent, tier=TIER_DEVICE)
        for parent, block in zip([b"", *chain], chain, strict=False)
    ]


async def ask(door: Door, salt: str = "") -> str:
    """Where the prompt goes."""
    request = GenerateRequest(
        token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=1, seed=1), cache_salt=salt
    )
    return (await door.generation.Generate(request)).final.group


async def test_a_prompt_goes_where_its_prefix_is(open_door: OpenDoor) -> None:
    """What a group's snapshot or events say it holds draws the prompt there, every time, and only for its tenant."""
    holder = FakeGroup("holder")
    holder.blocks = blocks()
    late = FakeGroup("late")
    door = await open_door(FakeGroup("a"), holder, FakeGroup("b"), late)
    await _indexed(door, 10)
    assert {await ask(door) for _ in range(6)} == {"holder"}
    assert len({await ask(door, salt="another tenant") for _ in range(24)}) > 1
    late.blocks = blocks("another tenant")
    late.send_events(*late.blocks)
    await _indexed(door, 20)
    assert {await ask(door, salt="another tenant") for _ in range(6)} == {"late"}


async def test_a_gap_is_healed_by_a_snapshot(open_door: OpenDoor) -> None:
    """Lost events make the router ask, and until the answer has come it promises nothing."""
    group = FakeGroup()
    door = await open_door(group)
    group.send_events(*blocks(), sequence=7)
    group.blocks, group.sequence = blocks(), 17
    await group.until(lambda: group.snapshot_requests == 1)
    await _indexed(door, 10)
    assert door.router.groups.index.stats().troubles[EventProblem.GAP] == 1


async def test_a_lost_group_leaves_nothing_behind(open_door: OpenDoor) -> None:
    """The moment a group is gone so are its blocks; a new incarnation starts from its own snapshot."""
    group = FakeGroup()
    group.blocks = blocks()
    door = await open_door(group)
    await _indexed(door, 10)
    await group.kill()
    await door.serving(0)
    assert door.router.groups.index.stats().entries == 0
    group.blocks = blocks()[:3]
    await group.start()
    await _indexed(door, 3)


async def _indexed(door: Door, entries: int) -> None:
    """Waits until the index holds that many; each look lets the links run."""
    while door.router.groups.index.stats().entries != entries:
        await door.admin.Status(StatusRequest())
    door.router.groups.index.check()


async def test_each_wrong_event_is_counted_and_makes_no_prefix(open_door: OpenDoor) -> None:
    """Of an older epoch, below a parent never seen, without a tier, repeated, with a gap before it, from a stranger:
    /metrics counts each by its kind, and none of them makes a prefix."""
    group = FakeGroup()
    door = await open_door(group)
    first, second = blocks()[:2]
    group.send_events(first, sequence=0, epoch="of an earlier incarnation")
    group.send_events(second)
    group.send_events(KvEvent(stored=True, block_hash=first.block_hash))
    group.send_events(second, sequence=0)
    group.send_events(first, sequence=1000)
    await group.until(lambda: group.snapshot_requests == 1)
    index = door.router.groups.index
    index.apply("a stranger", KvEvents(epoch="e", sequence=0, events=[first]))
    assert index.matched_blocks([first.block_hash, second.block_hash]) == {}
    page = door.router.metrics.render().decode()
    for kind in ("other_epoch", "no_parent", "unnamed", "repeated", "gap", "unknown_group"):
        assert f'coatcheck_index_troubles_total{{kind="{kind}"}} 1.0' in page, kind
