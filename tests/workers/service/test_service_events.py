"""Snapshots, KV events and load that rank 0's service sends to every router, on real streams."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent, StepOutput
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.service.message_conversion import CHUNK_BLOCKS
from tests.workers.served_group import Group, Router, start_group


async def test_events_follow_the_snapshot_without_a_gap(group: Group) -> None:
    """A router that attaches during work gets a snapshot and then exactly the events numbered from it on."""
    async with Router(group.address, "early") as early:
        await early.submit(1, list(range(40)), ignore_eos=True, max_tokens=60)
        await early.next("batch")
        async with Router(group.address, "late") as late:
            chunk = (await late.next("snapshot")).snapshot
            await early.answer()
            await early.submit(2, list(range(100, 140)), ignore_eos=True, max_tokens=20)
            await early.answer()
            held = {event.block_hash for event in chunk.events}
            expected, total = (
                chunk.sequence,
                await asyncio.wrap_future(
                    group.loop.call_between_steps(lambda engine: engine.begin_snapshot().read_chunk(64))
                ),
            )
            async for message in late.messages("events"):
                assert message.events.sequence == expected and message.events.epoch == "e"
                expected += len(message.events.events)
                held |= {event.block_hash for event in message.events.events if event.stored}
                held -= {event.block_hash for event in message.events.events if not event.stored}
                if held == {event.block_hash for event in total}:
                    break


async def test_a_snapshot_may_be_asked_for_again(group: Group) -> None:
    """A router that has missed events requests a new snapshot on its stream."""
    async with Router(group.address) as router:
        assert not (await router.next("snapshot")).snapshot.events
        await router.submit(1, list(range(40)), max_tokens=2)
        await router.answer()
        await router.send(snapshot=wire.SnapshotRequest())
        again = (await router.next("snapshot")).snapshot
        assert len(again.events) == 5 and again.sequence == 5


def fill_pool(engine: Engine, blocks: int) -> None:
    """Cache prompts of 100 blocks."""
    pool = engine.scheduler.pool
    held, parent = pool.allocate_blocks(blocks), b""
    for number, block in enumerate(held):
        parent = b"" if number % 100 == 0 else parent
        pool.register_block(block, number.to_bytes(16, "big"), parent, number % 100)
        parent = number.to_bytes(16, "big")
    pool.release_blocks(held)
    pool.drain_events()


async def test_a_long_snapshot_comes_between_tokens_and_events() -> None:
    """The chunks of a long snapshot come one by one. Tokens of each step come between them, and a router that applies
    chunks and events as they come ends with the blocks held. A snapshot that is asked for meanwhile begins anew."""
    group = start_group(num_blocks=4 * CHUNK_BLOCKS)
    group.runner.step_seconds = 0.002
    try:
        await asyncio.wrap_future(
            group.loop.call_between_steps(lambda engine: fill_pool(engine, 3 * CHUNK_BLOCKS + CHUNK_BLOCKS // 2))
        )
        async with Router(group.address, "early") as early:
            await early.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=2000)
            await early.next("batch")
            async with Router(group.address, "late") as late:
                await late.submit(1, list(range(100)), ignore_eos=True, max_tokens=2000)
                held, sequence, firsts, kinds = set[bytes](), 0, 0, list[str]()
                async for message in late.messages("snapshot", "events", "batch"):
                    kinds.append(message.WhichOneof("message") or "")
                    if kinds[-1] == "snapshot":
                        chunk = message.snapshot
                        assert chunk.first or chunk.sequence == sequence, "an event is missing before the chunk"
                        assert len(chunk.events) <= CHUNK_BLOCKS
                        if chunk.first:
                            held, firsts = set(), firsts + 1
                            if firsts == 1:
                                await late.send(snapshot=wire.SnapshotRequest())
                        held |= {event.block_hash for event in chunk.events}
                        sequence = chunk.sequence
                        if chunk.last and firsts == 2:
                            break
                    elif kinds[-1] == "events":
                        assert message.events.sequence == sequence
                        sequence += len(message.events.events)
                        held |= {event.block_hash for event in message.events.events if event.stored}
                        held -= {event.block_hash for event in message.events.events if not event.stored}
                assert kinds.count("snapshot") >= 5 and "batch" in kinds[kinds.index("snapshot") :]

                def missing(engine: Engine) -> set[bytes]:
                    return held - {event.block_hash for event in engine.begin_snapshot().read_chunk(10**6)}

                assert not await asyncio.wrap_future(group.loop.call_between_steps(missing)), "no block is evicted here"
    finally:
        group.loop.stop()
        group.service.stop()


async def test_load_comes_after_a_change_and_while_idle(group: Group) -> None:
    """Load reports what runs, and an idle group repeats it as a heartbeat."""
    async with Router(group.address) as router:
        group.runner.step_seconds = 0.05
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=400)
        while (load := (await router.next("load")).load).status.running != 1:
            pass
        await router.send(abort=wire.Abort(id=1))
        assert load.status.blocks_total == 64 and load.status.state == "serving"
        while (load := (await router.next("load")).load).status.running != 0:
            pass
        later = (await router.next("load")).load
        assert later.status.ranks[0].steps > load.status.ranks[0].steps


async def test_a_load_counts_exactly_the_submissions_that_it_names(group: Group) -> None:
    """A load names how many of the router's submissions it contains. The requests that run or wait are those
    submissions of all routers, without those that the service or the engine refused."""
    group.runner.step_seconds = 0.02
    kinds: list[tuple[str, list[int], dict[str, Any]]] = [
        ("kept", [1, 2, 3], {"max_tokens": 400, "ignore_eos": True}),
        ("refused by the service", [1], {"max_tokens": 1, "temperature": -1.0}),
        ("refused by the engine", [5000], {"max_tokens": 1}),
    ]
    sent: dict[str, list[bool]] = {"a": [], "b": []}  # by router, in the order of sending: whether it is kept
    loads: dict[str, dict[int, wire.Load]] = {"a": {}, "b": {}}  # by router and step

    async with Router(group.address, "a") as a, Router(group.address, "b") as b:

        async def submit(router: Router, kind: int) -> None:
            name, prompt, sampling = kinds[kind]
            sent[router.hello.router].append(name == "kept")
            await router.submit(len(sent[router.hello.router]), prompt, **sampling)

        async def hear(router: Router) -> None:
            """Read loads until one contains all that the router has sent."""
            async for message in router.messages("load"):
                load, name = message.load, router.hello.router
                loads[name][load.status.ranks[0].steps] = load
                if load.submissions == len(sent[name]):
                    break

        for order in ([0, 1, 0], [2, 0, 1], [1, 2, 0]):
            await asyncio.gather(hear(a), hear(b))
            for kind in order:
                await submit(a, kind)
                await submit(b, (kind + 1) % 3)
        await asyncio.gather(hear(a), hear(b))
    common = loads["a"].keys() & loads["b"].keys()
    assert len(common) >= 2
    for step in common:
        one, other = loads["a"][step], loads["b"][step]
        kept = sum(sent["a"][: one.submissions]) + sum(sent["b"][: other.submissions])
        assert one.status.running + one.status.waiting == kept
    assert [sorted(of.items())[-1][1].submissions for of in loads.values()] == [9, 9]


async def test_load_is_sent_during_a_long_step(group: Group) -> None:
    """Load is reported during a step of seconds, such as a large prefill on a CPU."""
    async with Router(group.address) as router:
        await router.next("load")
        group.runner.step_seconds = 4.5
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=1)
        steps = []
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            async for message in router.messages("load", "batch"):
                if message.HasField("batch"):
                    break
                steps.append(message.load.status.ranks[0].steps)
        assert len(steps) - len(set(steps)) >= 2, "no load was repeated while the step went on"
        group.runner.step_seconds = 0.0  # the next one, which ends the test


async def test_a_router_that_does_not_read_is_disconnected() -> None:
    """When a router's outbox is full its stream ends with RESOURCE_EXHAUSTED, and the engine does not wait."""
    group = start_group(num_blocks=4096, buffer_bytes=4096)
    async with Router(group.address, "sleeps") as sleeps:
        await sleeps.next("snapshot")
        events = [KvEvent(True, bytes([i % 256]) * 16, b"", Tier.DEVICE) for i in range(5000)]
        stats = await asyncio.wrap_future(group.loop.call_between_steps(Engine.stats))
        group.loop.call_between_steps(lambda _: group.service.publish(StepOutput(0, [], events), stats)).result()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for _ in sleeps.messages("events"):
                pass
        assert cut.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "'sleeps' left more than 4096 bytes unread" in (cut.value.details() or "")
    async with Router(group.address) as again:
        await again.submit(1, [1, 2], max_tokens=2)
        assert (1, 0) in await again.answer()
    group.loop.stop()
    group.service.stop()
