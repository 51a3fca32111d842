"""A stream that loses its router continues at another router with the same tokens."""

import asyncio
from pathlib import Path

from coatcheck.bench.failure_cases.chaos_load import cases, difference, with_stop
from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.workers.core.group_config import GroupConfig
from tests.chaos.held_back_rank import HeldBackRank, hold_file
from tests.router.tiny_tokenizer import write_model
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.rank_group import RankGroup


async def test_every_kind_of_stream_goes_on_at_another_router(tmp_path: Path) -> None:
    """Greedy, sampled, n of 3, penalties, log-probabilities and stop strings: our client sends seed and token ids to
    the next router, and the whole answer equals an undisturbed one."""
    model = write_model(tiny_checkpoint("llama", tmp_path, vocab_size=600, max_position_embeddings=2048))
    config = GroupConfig("a", str(model), "tiny", kv_memory=8 << 20, dtype="float32", device="cpu", threads=1)
    group = RankGroup(config, HeldBackRank)
    routers = [Router(RouterConfig(str(model), "tiny", name=f"router-{number}")) for number in range(2)]
    addresses = [await router.start() for router in routers]
    undisturbed, client = AsyncClient(addresses[1:]), AsyncClient(addresses)
    try:
        where = await asyncio.to_thread(group.wait_ready)
        for router in routers:
            await router.set_groups([GroupEndpoint("a", where)])
            while not router.groups.serving():
                await router.groups.next_change.wait()
        requests = cases(600, tokens=120)[::2]
        expected = list(await asyncio.gather(*(_answer(undisturbed, request) for request in requests)))
        for request, answer in list(zip(requests, expected, strict=True))[:2]:
            stopped = with_stop(request, answer)
            assert stopped is not None
            requests.append(stopped)
            expected.append(await _answer(undisturbed, stopped))
        hold_file(model).touch()  # 120 steps take 12 s: no stream ends before all have begun
        begun = [asyncio.Event() for _ in requests]
        streams = [asyncio.create_task(_answer(client, *pair)) for pair in zip(requests, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        assert not any(stream.done() for stream in streams)
        await routers[0].stop()
        hold_file(model).unlink()
        for answer, before in zip(await asyncio.gather(*streams), expected, strict=True):
            assert difference(before, answer) == ""
        page = routers[1].metrics.render().decode()
        assert f"coatcheck_resumes_total {len(requests):.1f}" in page
    finally:
        await client.close()
        await undisturbed.close()
        for router in routers:
            await router.stop()
        group.kill()


async def _answer(
    client: AsyncClient, request: pb.GenerateRequest, begun: asyncio.Event | None = None
) -> GenerationResult:
    answer = GenerationResult(0.0)
    async for event in client.stream_events(request):
        answer.add(event, 0.0)
        if begun is not None and len(answer.choices) == (request.sampling.n or 1):
            begun.set()
    return answer
