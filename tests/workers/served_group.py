"""A group with the real engine and service over a fake runner, and a router's end of a stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep

BLOCK = 8


class PacedRunner(FakeRunner):
    """A FakeRunner whose steps take `step_seconds`."""

    step_seconds = 0.0005

    def launch(self, plan: StepPlan) -> FakeStep:
        time.sleep(self.step_seconds)
        return super().launch(plan)


@dataclass
class Group:
    """The real engine and service over a fake runner."""

    engine: Engine
    loop: EngineThread
    runner: PacedRunner
    service: WorkerService
    address: str


def start_group(
    *,
    num_blocks: int = 64,
    buffer_bytes: int = 1 << 20,
    loop_kind: type[EngineThread] = EngineThread,
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
        await self.channel.close()  # type: ignore[call-arg]

    async def send(self, **message: Any) -> None:
        await self.stream.write(wire.ToGroup(**message))

    async def submit(self, id: int, prompt: list[int], attempt: int = 0, **sampling: Any) -> None:
        parameters = public.SamplingParams(**sampling)
        submit = wire.Submit(id=id, attempt=attempt, prompt_token_ids=prompt, sampling=parameters)
        await self.send(submit=submit)

    async def messages(self, *kinds: str) -> AsyncIterator[wire.FromGroup]:
        while (message := await asyncio.wait_for(self.stream.read(), MAX_WAIT_SECONDS)) is not grpc.aio.EOF:  # type: ignore[attr-defined]
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


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = MAX_WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


async def choices_running(group: Group, count: int) -> bool:
    stats = await asyncio.wrap_future(group.loop.call_between_steps(Engine.stats))
    return stats.running + stats.waiting == count


async def is_idle(group: Group) -> bool:
    stats = await asyncio.wrap_future(group.loop.call_between_steps(Engine.stats))
    group.service.table.check()
    return stats.running + stats.waiting + stats.blocks_used == 0
