"""A burst of requests on real engines and services with slow runners."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.errors import Overloaded
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService
from tests.router.tiny_tokenizer import write_model
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import SPEC
from tests.workers.served_group import PacedRunner

SEATS, READY = 8, 4  # limits of running and of waiting sequences in a group
BLOCKS, BLOCK = 256, 8
REQUESTS, QUEUED = 600, 200


class Group:
    """Rank 0's engine and service. `most_held`: the largest number of requests that ran or waited there after a
    step."""

    def __init__(self, name: str) -> None:
        engine = Engine(SPEC, PacedRunner(BLOCKS, BLOCK), num_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=SEATS)
        model = public.GetModelResponse(
            name="tiny", max_model_len=512, vocab_size=SPEC.vocab_size, block_size=BLOCK, fingerprint=SPEC.fingerprint
        )
        registration = wire.Registration(
            group=name, epoch=name, model=model, num_blocks=BLOCKS, max_num_seqs=SEATS, contract=CONTRACT,
            version=VERSION,
        )  # fmt: skip
        self.most_held = 0
        self._service = WorkerService(GroupReport(registration, [public.RankStatus(rank=0, healthy=True)]))
        self._loop = EngineThread(engine, on_step=self._publish, on_death=lambda error: None)
        self.address = GroupEndpoint(name, self._service.start(self._loop, "127.0.0.1:0"))
        self._loop.start()

    def stop(self) -> None:
        """Stop the engine and the service."""
        self._loop.stop()
        self._service.stop()

    def _publish(self, output: StepOutput, stats: EngineStats) -> None:
        self.most_held = max(self.most_held, stats.running + stats.waiting)
        self._service.publish(output, stats)


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Two groups."""
    with ExitStack() as ends:
        made = [Group(name) for name in ("g0", "g1")]
        for group in made:
            ends.callback(group.stop)
        yield made


async def test_a_burst_never_overfills_a_group(tmp_path: Path, groups: list[Group]) -> None:
    """Of 600 requests at once, no group ever holds more than its seats and its limit of waiting requests. 200 wait in
    the router, those beyond are refused, and all others are answered."""
    router = Router(RouterConfig(model="tiny", max_queued=QUEUED), TokenizerJson.load(str(write_model(tmp_path))))
    await router.start()
    try:
        await router.set_groups([group.address for group in groups])
        while len(router.groups.serving()) < len(groups):
            await router.groups.next_change.wait()

        async def ask(number: int) -> bool:
            """Returns whether the request was answered."""
            sampling = public.SamplingParams(max_tokens=20, seed=number, ignore_eos=True)
            ids = public.TokenIds(ids=[1 + number % 900, 5, 6])
            try:
                await router.generation.generate(public.GenerateRequest(token_ids=ids, sampling=sampling))
            except Overloaded:
                return False
            return True

        answered = sum(await asyncio.gather(*(ask(number) for number in range(REQUESTS))))
    finally:
        await router.stop()
    room = len(groups) * (SEATS + READY)
    assert max(group.most_held for group in groups) <= SEATS + READY
    assert QUEUED + room <= answered < REQUESTS
