"""A request that crashes its ranks costs two groups, not a third, and no other request is harmed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.bench.failure_cases.chaos_load import difference
from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.errors import Poisoned
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.workers.core.group_config import GroupConfig
from tests.router.tiny_tokenizer import write_model
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.crashing_rank import RAISES, CrashingRank
from tests.workers.rank_group import RankGroup

_STREAMS = 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer."""
    return write_model(tiny_checkpoint("llama", tmp_path, vocab_size=600, max_position_embeddings=2048))


@pytest.fixture
def groups(model: Path) -> Iterator[dict[str, RankGroup]]:
    """Three groups of one rank each."""
    started = {}
    for name in ("a", "b", "c"):
        config = GroupConfig(
            name, str(model), "tiny", kv_memory=8 << 20, dtype="float32", device="cpu", threads=1, max_batch_tokens=64
        )
        started[name] = RankGroup(config, CrashingRank)
    yield started
    for group in started.values():
        group.kill()


def innocent(number: int) -> pb.GenerateRequest:
    """A stream that is long enough to run while the others come."""
    sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.9, seed=number, logprobs=1)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[20 + number, 30, 40]), sampling=sampling)


async def test_two_groups_are_lost_and_no_third(model: Path, groups: dict[str, RankGroup]) -> None:
    """The request that raises in a step is refused after the second group has ended by it. The third group runs on, and
    every other stream ends as it would have, whether it lost none, one or two groups."""
    router = Router(RouterConfig(str(model), "tiny"))
    address = await router.start()
    client = AsyncClient([address])
    try:
        found = {name: await asyncio.to_thread(group.wait_ready) for name, group in groups.items()}
        await router.set_groups([GroupEndpoint(name, where) for name, where in found.items()])
        while len(router.groups.serving()) < len(groups):
            await router.groups.next_change.wait()
        expected = await asyncio.gather(*(_answer(client, innocent(number)) for number in range(_STREAMS)))
        begun = [asyncio.Event() for _ in range(_STREAMS)]
        running = [asyncio.create_task(_answer(client, innocent(number), begun[number])) for number in range(_STREAMS)]
        await asyncio.gather(*(event.wait() for event in begun))
        poisonous = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[RAISES, 5]))
        with pytest.raises(Poisoned, match="2 groups in a row crashed .*ValueError: a defect"):
            await _answer(client, poisonous)
        for answer, before in zip(await asyncio.gather(*running), expected, strict=True):
            assert difference(before, answer) == ""
        lives = [name for name, group in groups.items() if group.processes[0].is_alive()]
        assert len(lives) == 1
        assert [link.name for link in router.groups.serving()] == lives
    finally:
        await client.close()
        await router.stop()


async def _answer(
    client: AsyncClient, request: pb.GenerateRequest, begun: asyncio.Event | None = None
) -> GenerationResult:
    answer = GenerationResult(0.0)
    async for event in client.stream_events(request):
        answer.add(event, 0.0)
        if begun is not None and event.HasField("delta"):
            begun.set()
    return answer
