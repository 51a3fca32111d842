"""Routing end to end: events in, placement out, and an index that heals itself."""

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
from tests.router.routing.reported_prefix import PROMPT, blocks


async def ask(router: RouterUnderTest, salt: str = "") -> str:
    """Where the prompt goes."""
    request = GenerateRequest(
        token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=1, seed=1), cache_salt=salt
    )
    answer: GenerateResponse = await router.generation.Generate(request)
    return answer.final.group


async def test_a_prompt_goes_where_its_prefix_is(start_router: StartRouter) -> None:
    """What a group's snapshot or events say it holds draws the prompt there, every time, and only for its tenant."""
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
    """Lost events make the router ask, and until the answer has come it promises nothing."""
    group = FakeGroup()
    router = await start_router(group)
    group.send_events(*blocks(), sequence=7)
    group.blocks, group.sequence = blocks(), 17
    await group.until(lambda: group.snapshot_requests == 1)
    await _indexed(router, 10)
    assert router.server.groups.index.problems[EventProblem.GAP] == 1


async def test_a_lost_group_leaves_nothing_behind(start_router: StartRouter) -> None:
    """The moment a group is gone so are its blocks; a new incarnation starts from its own snapshot."""
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
    """Waits until the index holds that many; each look lets the links run."""
    while router.server.groups.index.entries != entries:
        await router.admin.Status(StatusRequest())
    router.server.groups.index.check()


async def test_each_wrong_event_is_counted_and_makes_no_prefix(start_router: StartRouter) -> None:
    """Of an older epoch, below a parent never seen, without a tier, repeated, with a gap before it, from a stranger:
    /metrics counts each by its kind, and none of them makes a prefix."""
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
    assert index.matched_blocks([first.block_hash, second.block_hash]) == {}
    page = router.server.metrics.render().decode()
    for kind in ("other_epoch", "no_parent", "unnamed", "repeated", "gap", "unknown_group"):
        assert f'coatcheck_index_troubles_total{{kind="{kind}"}} 1.0' in page, kind
