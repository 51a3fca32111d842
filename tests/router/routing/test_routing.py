"""Routing end to end: from KV events to the chosen group, and the recovery of the index from gaps and losses."""

from coatcheck.proto.stubs.coatcheck_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StatusRequest,
    TokenIds,
)
from coatcheck.proto.stubs.worker_pb2 import KvEvent, KvEvents
from coatcheck.router.routing.block_locations import EventProblem
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter
from tests.router.routing.index_events import matched_blocks
from tests.router.routing.reported_prefix import PROMPT, blocks


async def ask(router: RouterUnderTest, salt: str = "") -> str:
    """The group that the prompt is sent to."""
    request = GenerateRequest(
        token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=1, seed=1), cache_salt=salt
    )
    answer: GenerateResponse = await router.generation.Generate(request)
    return answer.final.group


async def test_a_prompt_goes_where_its_prefix_is(start_router: StartRouter) -> None:
    """Blocks of a group's snapshot or events attract the prompt, every time, and only with the same cache salt."""
    holder = FakeGroup("holder")
    holder.blocks = blocks()
    late = FakeGroup("late")
    router = await start_router(FakeGroup("a"), holder, FakeGroup("b"), late)
    await _indexed(router, 10)
    assert {await ask(router) for _ in range(6)} == {"holder"}
    assert len({await ask(router, salt="another tenant") for _ in range(24)}) > 1
    late.blocks = blocks("another tenant")
    late.send_events(*late.blocks)
    await _indexed(router, 20)
    assert {await ask(router, salt="another tenant") for _ in range(6)} == {"late"}


async def test_a_gap_is_healed_by_a_snapshot(start_router: StartRouter) -> None:
    """After a gap in the events the router requests a snapshot; until it comes, no block of the group matches."""
    group = FakeGroup()
    router = await start_router(group)
    group.send_events(*blocks(), sequence=7)
    group.blocks, group.sequence = blocks(), 17
    await group.until(lambda: group.snapshot_requests == 1)
    await _indexed(router, 10)
    assert router.server.groups.index.problems[EventProblem.GAP] == 1


async def test_a_lost_group_leaves_nothing_behind(start_router: StartRouter) -> None:
    """The blocks of a lost group are dropped at once; its next incarnation begins with its own snapshot."""
    group = FakeGroup()
    group.blocks = blocks()
    router = await start_router(group)
    await _indexed(router, 10)
    await group.kill()
    await router.wait_for_groups(0)
    assert router.server.groups.index.entries == 0
    group.blocks = blocks()[:3]
    await group.start()
    await _indexed(router, 3)


async def _indexed(router: RouterUnderTest, entries: int) -> None:
    """Waits until the index has `entries` entries. Each status call lets the connections run."""
    while router.server.groups.index.entries != entries:
        await router.admin.Status(StatusRequest())
    router.server.groups.index.check()


async def test_each_wrong_event_is_counted_and_makes_no_prefix(start_router: StartRouter) -> None:
    """Events of an older epoch, without their parent, malformed, repeated, after a gap, or of an unknown group:
    /metrics counts each kind, and none of them makes a prefix."""
    group = FakeGroup()
    router = await start_router(group)
    first, second = blocks()[:2]
    group.send_events(first, sequence=0, epoch="of an earlier incarnation")
    group.send_events(second)
    group.send_events(KvEvent(stored=True, block_hash=first.block_hash))
    group.send_events(second, sequence=0)
    group.send_events(first, sequence=1000)
    await group.until(lambda: group.snapshot_requests == 1)
    index = router.server.groups.index
    index.apply_events("a stranger", KvEvents(epoch="e", sequence=0, events=[first]))
    assert matched_blocks(index, [first.block_hash, second.block_hash]) == {}
    page = router.server.metrics.render().decode()
    for problem in ("other_epoch", "no_parent", "malformed", "repeated", "gap", "unknown_group"):
        assert f'coatcheck_index_event_problems_total{{problem="{problem}"}} 1.0' in page, problem
