"""Rank 0's gRPC service with a real engine, a fake runner and real streams."""

import asyncio
import threading
import time
from collections.abc import Callable

import grpc.aio
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.contract import CONTRACT
from coatcheck.proto.errors import CoatcheckError
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import SequenceOutput, StepOutput
from coatcheck.workers.engine.engine import Engine
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import answer
from tests.workers.served_group import BLOCK, Group, Router, choices_running, is_idle, start_group, until


class BrokenLoop(EngineThread):
    """An engine loop whose submissions fail."""

    def submit_request(
        self, request: EngineRequest, on_refused: Callable[[CoatcheckError], None], on_processed: Callable[[], None]
    ) -> None:
        raise ValueError("a defect")


async def test_attach_answers_registration_then_snapshot(group: Group) -> None:
    """The first message after Hello is the registration, the second a snapshot, empty at the start."""
    async with Router(group.address) as router:
        first = await asyncio.wait_for(router.stream.read(), MAX_WAIT_SECONDS)
        second = await asyncio.wait_for(router.stream.read(), MAX_WAIT_SECONDS)
    assert first.registration.group == "g" and first.registration.epoch == "e"
    assert second.snapshot.first and second.snapshot.last and not second.snapshot.events


async def test_a_group_that_hangs_does_not_register(group: Group) -> None:
    """A router gets no registration while the group's step does not end, and gets it as soon as the step ends."""
    release = threading.Event()
    group.loop.call_between_steps(lambda _: release.wait(MAX_WAIT_SECONDS))
    async with Router(group.address) as router:
        reading = asyncio.create_task(router.stream.read())
        done, _ = await asyncio.wait([reading], timeout=0.5)
        release.set()
        assert not done
        assert (await asyncio.wait_for(reading, MAX_WAIT_SECONDS)).HasField("registration")


async def test_a_stream_that_cannot_be_read_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An error while a router's message is handled ends its stream and is logged."""
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
    """The stream ends with both contract numbers. A router of another version with the same contract attaches."""
    async with Router(group.address, version="9.9.9") as router:
        assert (await router.next("registration")).registration.group == "g"
    async with Router(group.address, contract=CONTRACT + 1, version="9.9.9") as router:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stream.read()
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "router r runs coatcheck 9.9.9 with contract 1" in str(refused.value.details())


async def test_tokens_come_back_under_the_submissions_id(group: Group) -> None:
    """Every choice's tokens arrive in order, with id and attempt, and the last output has the finish reason."""
    async with Router(group.address) as router:
        await router.submit(7, [1, 2, 3], attempt=2, max_tokens=5, n=2)
        outputs = await router.answer(choices=2)
    assert set(outputs) == {(7, 0), (7, 1)}
    for (_, choice), parts in outputs.items():
        assert [token for part in parts for token in part.token_ids] == answer([1, 2, 3], 5, choice)
        assert {part.attempt for part in parts} == {2}
        assert [part.HasField("first_output") for part in parts] == [True] + [False] * (len(parts) - 1)
        assert parts[-1].finish_reason == public.FINISH_REASON_LENGTH


async def test_a_submission_behind_a_longer_queue_comes_back_at_once(group: Group) -> None:
    """While a step runs, a submission whose router expects a shorter queue is returned with the queue as it is, and
    counts as a submission in the next load report. One without a limit, or with a sufficient one, stays."""
    release = threading.Event()
    async with Router(group.address, "a") as one, Router(group.address, "b") as other:
        await asyncio.gather(one.next("snapshot"), other.next("snapshot"))
        group.loop.call_between_steps(lambda _: release.wait(MAX_WAIT_SECONDS))
        sampling = public.SamplingParams(max_tokens=1)
        await one.send(submit=wire.Submit(id=1, prompt_token_ids=[1] * 90, sampling=sampling))
        await one.send(submit=wire.Submit(id=2, prompt_token_ids=[2] * 30, uncached_tokens=10, sampling=sampling))
        late = wire.Submit(id=3, attempt=1, prompt_token_ids=[3] * 9, sampling=sampling, max_queued_tokens=99)
        await one.send(submit=late)
        returned = (await one.next("returned")).returned  # so the group has read the other router's two as well
        assert (returned.id, returned.attempt, returned.queued_prefill_tokens) == (3, 1, 100)
        await other.send(submit=wire.Submit(id=3, prompt_token_ids=[3] * 9, sampling=sampling, max_queued_tokens=99))
        assert (await other.next("returned")).returned.queued_prefill_tokens == 100
        late.max_queued_tokens = 100
        await one.send(submit=late)
        release.set()
        assert {id for id, _ in await one.answer(choices=3)} == {1, 2, 3}
        while (load := (await one.next("load")).load).all_submissions != 5:
            assert load.submissions <= 4
        await until(lambda: is_idle(group))


async def test_submissions_that_the_engine_has_not_read_have_not_started() -> None:
    """The failure notice of a group that ends names them as unstarted, apart from the first, which the engine may have
    in hand."""
    group, release = start_group(), threading.Event()

    def fail(_: Engine) -> None:
        release.wait(MAX_WAIT_SECONDS)
        group.service.send_failure_notice("a defect", set())

    async def all_are_open() -> bool:
        return len(group.service.table.requests) == 3

    try:
        async with Router(group.address) as router:
            await router.next("snapshot")
            group.loop.call_between_steps(fail)
            for id in (4, 5, 6):
                await router.submit(id, [1, 2, 3], max_tokens=1)
            await until(all_are_open)
            release.set()
            assert list((await router.next("failure_notice")).failure_notice.unstarted) == [5, 6]
    finally:
        group.loop.stop()
        group.service.stop()


async def test_two_routers_may_use_the_same_ids(group: Group) -> None:
    """Ids are unique per stream only. Each router gets the tokens of its own requests."""
    async with Router(group.address, "a") as one, Router(group.address, "b") as other:
        await one.submit(1, [1] * 4, max_tokens=3)
        await other.submit(1, [1] * 9, max_tokens=3)
        answers = await asyncio.gather(one.answer(), other.answer())
    first, second = ([token for part in answer[1, 0] for token in part.token_ids] for answer in answers)
    assert (first, second) == (answer([1] * 4, 3), answer([1] * 9, 3))


async def test_a_retained_prompt_outlives_a_flood(group: Group) -> None:
    """A retained prompt is still cached after requests of ten times the pool's size."""
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
        assert output.first_output.device_tokens == 7 * BLOCK


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "message"),
    [
        ([], {"max_tokens": 1}, 3, "empty"),
        ([1000], {"max_tokens": 1}, 3, "outside the vocabulary"),
        ([1], {"max_tokens": 1, "temperature": -1.0}, 3, "temperature is -1.0"),
        ([1] * 500, {"max_tokens": 100}, 3, "maximum context length is 512 tokens"),
    ],
)
async def test_bad_submissions_are_refused_and_nothing_else_is_disturbed(
    group: Group, prompt: list[int], sampling: dict[str, object], code: int, message: str
) -> None:
    """A refusal has the submission's id, a status code and what to change. Other requests go on."""
    async with Router(group.address) as router:
        await router.submit(1, [5, 6], ignore_eos=True, max_tokens=20)
        await router.submit(2, prompt, attempt=1, **sampling)
        refused = (await router.next("refused")).refused
        assert (refused.id, refused.attempt, refused.code) == (2, 1, code)
        assert message in refused.message
        await router.submit(3, [5, 6], max_tokens=2)
        assert (3, 0) in await router.answer(choices=2)


async def test_a_group_refuses_more_than_max_open_requests() -> None:
    """A group with `max_open` requests of all routers refuses one more as overloaded, until one ends or is aborted."""
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
                assert refused.message == "group g has 3 open requests, which is its limit"
            await other.send(abort=wire.Abort(id=1))
            await other.submit(3, [5, 6, 7], max_tokens=30)
            assert (3, 0) in await other.answer()  # after tokens of the aborted request
            await other.submit(4, [5, 6, 7], max_tokens=4)
            assert set(await other.answer()) == {(4, 0)}
    finally:
        group.loop.stop()
        group.service.stop()
        group.engine.check()


async def test_an_id_in_use_is_refused(group: Group) -> None:
    """A second submission with an open id is refused. The first goes on."""
    group.runner.step_seconds = 0.02
    async with Router(group.address) as router:
        await router.submit(1, [5], max_tokens=6)
        await router.submit(1, [5], max_tokens=6)
        assert "in use" in (await router.next("refused")).refused.message
        assert (1, 0) in await router.answer()


async def test_abort_frees_blocks_and_ends_a_choices_tokens(group: Group) -> None:
    """An aborted choice sends no more tokens while the other goes on. Aborting the request frees every block."""
    group.runner.step_seconds = 0.01
    async with Router(group.address) as router:
        await router.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=400, n=2)
        await router.next("batch")
        await router.send(abort=wire.Abort(id=1, choice=1))
        await until(lambda: choices_running(group, 1))
        while len((await router.next("batch")).batch.outputs) == 2:
            pass  # from before the abort
        for _ in range(3):
            assert [output.choice for output in (await router.next("batch")).batch.outputs] == [0]
        await router.send(abort=wire.Abort(id=1))
        await until(lambda: is_idle(group))
    assert not len(group.service.table.requests)


async def test_a_router_that_leaves_takes_its_requests_along(group: Group) -> None:
    """When a stream ends, its requests are aborted and their blocks freed. Another router's requests go on."""
    group.runner.step_seconds = 0.005
    async with Router(group.address, "stays") as stays:
        await stays.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=100)
        async with Router(group.address, "leaves") as leaves:
            await leaves.submit(1, [4, 5, 6], ignore_eos=True, max_tokens=400)
            await leaves.next("batch")
        await until(lambda: choices_running(group, 1))
        answer = await stays.answer()
        assert sum(len(part.token_ids) for part in answer[1, 0]) == 100
    await until(lambda: is_idle(group))


async def test_a_router_may_leave_before_its_snapshot_is_taken(group: Group) -> None:
    """Routers that attach and leave during a step do not disturb other routers' requests."""
    group.runner.step_seconds = 0.2
    async with Router(group.address, "stays") as stays:
        await stays.submit(1, [1, 2, 3], ignore_eos=True, max_tokens=8)
        await stays.next("batch")
        for _ in range(3):
            async with Router(group.address, "hasty") as hasty:
                await hasty.next("registration")
        answer = await stays.answer()
        assert answer[1, 0][-1].finish_reason == public.FINISH_REASON_LENGTH
    await until(lambda: is_idle(group))


async def test_publishing_a_large_batch_costs_the_engine_little(group: Group) -> None:
    """Publishing a step of 32 sequences takes less than half a millisecond of processor time."""
    async with Router(group.address) as router:
        group.runner.step_seconds = 0.05
        for id in range(32):
            await router.submit(id, [1], ignore_eos=True, max_tokens=400)
        await until(lambda: choices_running(group, 32))
        stats = await asyncio.wrap_future(group.loop.call_between_steps(Engine.stats))

        def publish(engine: Engine) -> float:
            outputs = [SequenceOutput(key, 0, [1]) for key in group.service.table.requests]
            costs = []
            for _ in range(50):
                started = time.thread_time()
                group.service.publish(StepOutput(1, outputs, []), stats)
                costs.append(time.thread_time() - started)
            return sorted(costs)[len(costs) // 2]

        median = await asyncio.wrap_future(group.loop.call_between_steps(publish))
    assert median < 0.5e-3
