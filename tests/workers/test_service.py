"""Rank 0's gRPC service: the real engine behind it, a fake runner under it, real streams in front."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import grpc.aio
import pytest

from coatcheck.proto import coatcheck_pb2 as public
from coatcheck.proto import worker_pb2 as wire
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.errors import CoatcheckError
from coatcheck.proto.worker_pb2_grpc import WorkerStub
from coatcheck.workers.engine import Engine
from coatcheck.workers.engine_loop import EngineLoop
from coatcheck.workers.group_report import GroupReport
from coatcheck.workers.request import Request
from coatcheck.workers.service import WorkerService
from coatcheck.workers.step_output import KvEvent, SequenceOutput, StepOutput
from coatcheck.workers.step_plan import StepPlan
from coatcheck.workers.subscriber import Subscriber
from coatcheck.workers.tier import Tier
from coatcheck.workers.wire import EVENTS_PER_MESSAGE, event_messages, snapshot_messages
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep, answer

BLOCK = 8


class PacedRunner(FakeRunner):
    """The fake runner, whose steps take `step_seconds`."""

    step_seconds = 0.0005

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(self.step_seconds)
        return super().launch(plan)


class BrokenLoop(EngineLoop):
    """An engine's loop with a defect."""

    def submit(self, request: Request, on_refused: Callable[[CoatcheckError], None]) -> None:
        raise ValueError("a defect")


@dataclass
class Group:
    """The real engine and service over a fake runner."""

    engine: Engine
    loop: EngineLoop
    runner: PacedRunner
    service: WorkerService
    address: str

    async def used_blocks(self) -> int:
        return (await asyncio.wrap_future(self.loop.call(Engine.stats))).blocks_used


def start_group(
    *,
    num_blocks: int = 64,
    buffer_bytes: int = 1 << 20,
    loop_kind: type[EngineLoop] = EngineLoop,
    max_open: int = 1 << 16,
) -> Group:
    runner = PacedRunner(num_blocks, BLOCK)
    engine = Engine(SPEC, runner, num_blocks=num_blocks, block_size=BLOCK)
    registration = wire.Registration(group="g", epoch="e", num_blocks=num_blocks)
    ranks = [public.RankStatus(rank=0, healthy=True)]
    service = WorkerService(GroupReport(registration, ranks), buffer_bytes=buffer_bytes, max_open=max_open)
    deaths: list[BaseException] = []
    loop = loop_kind(engine, on_step=service.publish, on_death=deaths.append)
    address = service.start(loop, "127.0.0.1:0")
    loop.start()
    return Group(engine, loop, runner, service, address)


@pytest.fixture
def group() -> Iterator[Group]:
    group = start_group()
    yield group
    group.loop.stop()
    group.service.stop()
    group.engine.check()


class Router:
    """A router's end of one stream."""

    def __init__(self, address: str, name: str = "r", contract: int = CONTRACT, version: str = VERSION) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stream = WorkerStub(self.channel).Attach()
        self.hello = wire.Hello(router=name, contract=contract, version=version)

    async def __aenter__(self) -> "Router":
        await self.send(hello=self.hello)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stream.cancel()
        await self.channel.close()

    async def send(self, **message: object) -> None:
        await self.stream.write(wire.ToGroup(**message))

    async def submit(self, id: int, prompt: list[int], attempt: int = 0, **sampling: object) -> None:
        parameters = public.SamplingParams(**sampling)
        submit = wire.Submit(id=id, attempt=attempt, prompt_token_ids=prompt, sampling=parameters)
        await self.send(submit=submit)

    async def messages(self, *kinds: str) -> AsyncIterator[wire.FromGroup]:
        while (message := await asyncio.wait_for(self.stream.read(), 10)) is not grpc.aio.EOF:
            if message.WhichOneof("message") in kinds:
                yield message

    async def next(self, *kinds: str) -> wire.FromGroup:
        async for message in self.messages(*kinds):
            return message
        raise AssertionError("the stream ended")

    async def answer(self, choices: int = 1) -> dict[tuple[int, int], list[wire.SequenceOutput]]:
        """Outputs by (id, choice) until `choices` choices have finished."""
        outputs: dict[tuple[int, int], list[wire.SequenceOutput]] = {}
        async for message in self.messages("batch"):
            for output in message.batch.outputs:
                outputs.setdefault((output.id, output.choice), []).append(output)
                choices -= output.finish_reason != 0
            if not choices:
                break
        return outputs


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


async def test_attach_answers_registration_then_snapshot(group: Group) -> None:
    """The first message after Hello is the registration, the second a snapshot, empty at the start."""
    async with Router(group.address) as router:
        first = await asyncio.wait_for(router.stream.read(), 5)
        second = await asyncio.wait_for(router.stream.read(), 5)
    assert first.registration.group == "g" and first.registration.epoch == "e"
    assert second.snapshot.first and second.snapshot.last and not second.snapshot.events


async def test_a_group_that_hangs_does_not_register(group: Group) -> None:
    """A router hears nothing from a group whose step does not end, and the registration as soon as it has."""
    release = threading.Event()
    group.loop.call(lambda _: release.wait(10))
    async with Router(group.address) as router:
        reading = asyncio.create_task(router.stream.read())
        done, _ = await asyncio.wait([reading], timeout=0.5)
        release.set()
        assert not done
        assert (await asyncio.wait_for(reading, 5)).HasField("registration")


async def test_a_stream_that_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A defect behind a router's message ends its stream, and the log says why."""
    group = start_group(loop_kind=BrokenLoop)
    try:
        async with Router(group.address) as router:
            await router.submit(1, [1, 2])
            with pytest.raises(AssertionError, match="the stream ended"):
                await router.next("batch")
    finally:
        group.loop.stop()
        group.service.stop()
    assert "the stream of router 'r' could not be read" in caplog.text and "a defect" in caplog.text


async def test_a_stream_must_begin_with_hello(group: Group) -> None:
    """Any other first message ends the stream with INVALID_ARGUMENT."""
    async with grpc.aio.insecure_channel(group.address) as channel:
        stream = WorkerStub(channel).Attach()
        await stream.write(wire.ToGroup(abort=wire.Abort(id=1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_of_another_contract_is_refused(group: Group) -> None:
    """Its stream ends with what does not go together; one of another version that speaks ours attaches."""
    async with Router(group.address, version="9.9.9") as router:
        assert (await router.next("registration")).registration.group == "g"
    async with Router(group.address, contract=CONTRACT + 1, version="9.9.9") as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stream.read()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "router r runs coatcheck 9.9.9 with contract 1" in str(refused.value.details())


async def test_tokens_come_back_under_the_submissions_id(group: Group) -> None:
    """Every choice's tokens arrive in order, with id and attempt, and the last one says why it ended."""
    async with Router(group.address) as router:
        await router.submit(7, [1, 2, 3], attempt=2, max_tokens=5, n=2)
        outputs = await router.answer(choices=2)
    assert set(outputs) == {(7, 0), (7, 1)}
    for (_, choice), parts in outputs.items():
        assert [token for part in parts for token in part.token_ids] == answer([1, 2, 3], 5, choice)
        assert {part.attempt for part in parts} == {2}
        assert [part.HasField("cached") for part in parts] == [True] + [False] * (len(parts) - 1)
        assert parts[-1].finish_reason == public.FINISH_REASON_LENGTH


async def test_two_routers_may_use_the_same_ids(group: Group) -> None:
    """Ids are unique per stream only; each router gets its own answers and nothing else."""
    async with Router(group.address, "a") as one, Router(group.address, "b") as other:
        await one.submit(1, [1] * 4, max_tokens=3)
        await other.submit(1, [1] * 9, max_tokens=3)
        answers = await asyncio.gather(one.answer(), other.answer())
    first, second = ([token for part in answer[1, 0] for token in part.token_ids] for answer in answers)
    assert (first, second) == (answer([1] * 4, 3), answer([1] * 9, 3))


async def test_a_retained_prompt_outlives_a_flood(group: Group) -> None:
    """What a router submits with a retention is found again after ten times the pool has gone by."""
    retained = [1 + token for token in range(8 * BLOCK)]
    retention = public.Retention(priority=90, ttl_seconds=600)
    async with Router(group.address) as router:
        sampling = public.SamplingParams(max_tokens=1)
        submit = wire.Submit(id=1, prompt_token_ids=retained, sampling=sampling, retention=retention)
        await router.send(submit=submit)
        await router.answer()
        for flood in range(2, 42):
            await router.submit(flood, [flood + 2 * token for token in range(16 * BLOCK)], max_tokens=1)
            await router.answer()
        await router.submit(99, retained, max_tokens=1)
        ((output,),) = (await router.answer()).values()
        assert output.cached.device_tokens == 7 * BLOCK


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "message"),
    [
        ([], {"max_tokens": 1}, 3, "empty"),
        ([1000], {"max_tokens": 1}, 3, "outside the vocabulary"),
        ([1], {"max_tokens": 1, "temperature": -1.0}, 3, "temperature is -1.0"),
        ([1] * 500, {"max_tokens": 100}, 3, "this server holds 512"),
    ],
)
async def test_bad_submissions_are_refused_and_nothing_else_is_disturbed(
    group: Group, prompt: list[int], sampling: dict[str, object], code: int, message: str
) -> None:
    """A refusal names the submission, carries its code and what to change; others run on."""
    async with Router(group.address) as router:
        await router.submit(1, [5, 6], ignore_eos=True, max_tokens=20)
        await router.submit(2, prompt, attempt=1, **sampling)
        refused = (await router.next("refused")).refused
        assert (refused.id, refused.attempt, refused.code) == (2, 1, code)
        assert message in refused.message
        await router.submit(3, [5, 6], max_tokens=2)
        assert (3, 0) in await router.answer(choices=2)


async def test_a_group_holds_so_many_requests_and_no_more() -> None:
    """Of all its routers together: one more is refused as for later, and taken once another has ended or is aborted."""
    group = start_group(max_open=3)
    group.runner.step_seconds = 0.01
    try:
        async with Router(group.address, "r1") as one, Router(group.address, "r2") as other:
            await one.submit(1, [5, 6, 7], max_tokens=30)
            await one.submit(2, [5, 6, 7], max_tokens=200)
            await one.next("batch")
            await other.submit(1, [5, 6, 7], max_tokens=200)
            await other.next("batch")
            for router in (one, other):
                await router.submit(9, [5, 6, 7], attempt=4, max_tokens=4)
                refused = (await router.next("refused")).refused
                assert (refused.id, refused.attempt) == (9, 4)
                assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert refused.message == "group g has 3 requests, as many as it holds"
            await other.send(abort=wire.Abort(id=1))
            await other.submit(3, [5, 6, 7], max_tokens=30)
            assert (3, 0) in await other.answer()  # behind what had been computed of the other one
            await other.submit(4, [5, 6, 7], max_tokens=4)
            assert set(await other.answer()) == {(4, 0)}
    finally:
        group.loop.stop()
        group.service.stop()
        group.engine.check()


async def test_an_id_in_use_is_refused(group: Group) -> None:
    """A second submission under a live id is refused, the first goes on."""
    group.runner.step_seconds = 0.02
    async with Router(group.address) as router:
        await router.submit(1, [5], max_tokens=6)
        await router.submit(1, [5], max_tokens=6)
        assert "in use" in (await router.next("refused")).refused.message
        assert (1, 0) in await router.answer()


async def test_abort_frees_blocks_and_silences_a_choice(group: Group) -> None:
    """An aborted choice sends no more tokens while the other runs on; aborting all frees every block."""
    group.runner.step_seconds = 0.01
    async with Router(group.address) as router:
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=400, n=2)
        await router.next("batch")
        await router.send(abort=wire.Abort(id=1, choice=1))
        await until(lambda: _choices_running(group, 1))
        while len((await router.next("batch")).batch.outputs) == 2:
            pass  # from before the abort
        for _ in range(3):
            assert [output.choice for output in (await router.next("batch")).batch.outputs] == [0]
        await router.send(abort=wire.Abort(id=1))
        await until(lambda: _is_idle(group))
    assert not len(group.service._tickets)


async def test_a_router_that_leaves_takes_its_requests_along(group: Group) -> None:
    """When a stream ends its requests are aborted and their blocks freed; another router's go on."""
    group.runner.step_seconds = 0.005
    async with Router(group.address, "stays") as stays:
        await stays.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=100)
        async with Router(group.address, "leaves") as leaves:
            await leaves.submit(1, [4, 5, 6], ignore_eos=True, max_tokens=400)
            await leaves.next("batch")
        await until(lambda: _choices_running(group, 1))
        answer = await stays.answer()
        assert sum(len(part.token_ids) for part in answer[1, 0]) == 100
    await until(lambda: _is_idle(group))


async def test_a_router_may_leave_before_its_snapshot_is_taken(group: Group) -> None:
    """Routers that come and go while a step is under way leave the engine and the others' requests undisturbed."""
    group.runner.step_seconds = 0.2
    async with Router(group.address, "stays") as stays:
        await stays.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=8)
        await stays.next("batch")
        for _ in range(3):
            async with Router(group.address, "hasty") as hasty:
                await hasty.next("registration")
        answer = await stays.answer()
        assert answer[1, 0][-1].finish_reason == public.FINISH_REASON_LENGTH
    await until(lambda: _is_idle(group))


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
            expected, total = chunk.sequence, await asyncio.wrap_future(group.loop.call(Engine.snapshot))
            async for message in late.messages("events"):
                assert message.events.sequence == expected and message.events.epoch == "e"
                expected += len(message.events.events)
                held |= {event.block_hash for event in message.events.events if event.stored}
                held -= {event.block_hash for event in message.events.events if not event.stored}
                if held == {event.block_hash for event in total}:
                    break


async def test_a_snapshot_may_be_asked_for_again(group: Group) -> None:
    """A router that lost count asks for a snapshot on the stream it has, and gets one as of now."""
    async with Router(group.address) as router:
        assert not (await router.next("snapshot")).snapshot.events
        await router.submit(1, list(range(40)), max_tokens=2)
        await router.answer()
        await router.send(snapshot=wire.SnapshotRequest())
        again = (await router.next("snapshot")).snapshot
        assert len(again.events) == 5 and again.sequence == 5


async def test_load_comes_soon_after_a_change_and_once_a_second(group: Group) -> None:
    """Load says what runs soon after it changed, and repeats while idle as the engine's heartbeat."""
    async with Router(group.address) as router:
        group.runner.step_seconds = 0.01
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=60)
        started = time.monotonic()
        while (load := (await router.next("load")).load).status.running != 1:
            assert time.monotonic() - started < 2
        assert load.status.blocks_total == 64 and load.status.state == "serving"
        while (load := (await router.next("load")).load).status.running != 0:
            pass
        quiet = time.monotonic()
        later = (await router.next("load")).load
        assert time.monotonic() - quiet < 2.5
        assert later.status.ranks[0].steps > load.status.ranks[0].steps


async def test_probe_answers_between_steps(group: Group) -> None:
    """Probe returns the registration and the status of an engine that steps."""
    async with grpc.aio.insecure_channel(group.address) as channel:
        answer = await WorkerStub(channel).Probe(wire.ProbeRequest(), timeout=5)
    assert answer.registration.epoch == "e" and answer.status.blocks_total == 64


async def test_a_router_that_does_not_read_is_cut_off() -> None:
    """When a router's buffer is full its stream ends with RESOURCE_EXHAUSTED, and the engine never waited."""
    group = start_group(num_blocks=4096, buffer_bytes=4096)
    async with Router(group.address, "sleeps") as sleeps:
        await sleeps.next("snapshot")
        events = [KvEvent(True, bytes([i % 256]) * 16, b"", Tier.DEVICE) for i in range(5000)]
        stats = await asyncio.wrap_future(group.loop.call(Engine.stats))
        group.loop.call(lambda _: group.service.publish(StepOutput(0, [], events), stats)).result()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            async for _ in sleeps.messages("events"):
                pass
        assert cut.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "'sleeps' let more than 4096 bytes pile up" in (cut.value.details() or "")
    async with Router(group.address) as again:
        await again.submit(1, [1, 2], max_tokens=2)
        assert (1, 0) in await again.answer()
    group.loop.stop()
    group.service.stop()


def test_messages_of_events_keep_the_contracts_bound() -> None:
    """A full message of stored events stays below 256 KiB, and chunks say which is first and last."""
    events = [KvEvent(True, b"h" * 16, b"p" * 16, Tier.DEVICE)] * (2 * EVENTS_PER_MESSAGE + 1)
    chunks = list(snapshot_messages("e" * 36, 2**60, events))
    assert [(chunk.snapshot.first, chunk.snapshot.last) for chunk in chunks] == [(1, 0), (0, 0), (0, 1)]
    assert max(chunk.ByteSize() for chunk in chunks) <= 256 << 10
    sequences = [message.events.sequence for message in event_messages("e", 10, events)]
    assert sequences == [10, 10 + EVENTS_PER_MESSAGE, 10 + 2 * EVENTS_PER_MESSAGE]


async def test_tokens_overtake_a_snapshot_and_events_do_not() -> None:
    """While a snapshot is sent, tokens go first, and events wait; those that it contains are dropped."""
    subscriber = Subscriber(1, "r", buffer_bytes=1 << 20)
    sent: list[str] = []

    async def write(message: wire.FromGroup) -> None:
        kind = message.WhichOneof("message") or ""
        sent.append(f"{kind}{message.events.sequence}" if kind == "events" else kind)

    def events(sequence: int) -> wire.FromGroup:
        return wire.FromGroup(events=wire.KvEvents(sequence=sequence, events=[wire.KvEvent()]))

    subscriber.hold_events()
    for message in (events(1), events(2), wire.FromGroup(batch=wire.StepBatch())):
        subscriber.put(message)
    chunk = wire.FromGroup(snapshot=wire.SnapshotChunk())
    subscriber.put_snapshot(2, iter([chunk, chunk]))
    writer = asyncio.create_task(subscriber.write_to(write))
    await asyncio.sleep(0)
    subscriber.put(events(3))
    await asyncio.sleep(0)
    writer.cancel()
    assert sent == ["batch", "snapshot", "snapshot", "events2", "events3"]


async def test_publishing_a_large_batch_costs_the_engine_little(group: Group) -> None:
    """A step of 32 sequences is published in well under half a millisecond."""
    async with Router(group.address) as router:
        group.runner.step_seconds = 0.05
        for id in range(32):
            await router.submit(id, [1], ignore_eos=True, max_tokens=400)
        await until(lambda: _choices_running(group, 32))
        stats = await asyncio.wrap_future(group.loop.call(Engine.stats))

        def publish(engine: Engine) -> float:
            outputs = [SequenceOutput(key, 0, [1]) for key in group.service._tickets]
            costs = []
            for _ in range(50):
                started = time.perf_counter()
                group.service.publish(StepOutput(1, outputs, []), stats)
                costs.append(time.perf_counter() - started)
            return sorted(costs)[len(costs) // 2]

        median = await asyncio.wrap_future(group.loop.call(publish))
    assert median < 0.5e-3


async def _choices_running(group: Group, count: int) -> bool:
    stats = await asyncio.wrap_future(group.loop.call(Engine.stats))
    return stats.running + stats.waiting == count


async def _is_idle(group: Group) -> bool:
    stats = await asyncio.wrap_future(group.loop.call(Engine.stats))
    group.service._tickets.check()
    return stats.running + stats.waiting + stats.blocks_used == 0


async def test_a_long_step_is_not_silence(group: Group) -> None:
    """While a step takes seconds, as a large prefill on a CPU may, load goes on being reported."""
    async with Router(group.address) as router:
        await router.next("load")
        group.runner.step_seconds = 4.5
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=1)
        steps = []
        async with asyncio.timeout(10):
            async for message in router.messages("load", "batch"):
                if message.HasField("batch"):
                    break
                steps.append(message.load.status.ranks[0].steps)
        assert len(steps) - len(set(steps)) >= 2, "no load was repeated while the step went on"
