"""A group that is slow but answers: its process gets a tenth of the CPU time."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, TokenIds
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.tiny_tokenizer import write_model
from tests.workers.fake_runner import answer

_TOKENS = 200
_STREAMS = 8


class Streams:
    """Eight streams at a time, each with a known answer."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.moves = 0

    async def run_streams(self, until: asyncio.Event) -> None:
        """Run the streams until the event `until` is set."""
        async with asyncio.TaskGroup() as tasks:
            for lane in range(_STREAMS):
                tasks.create_task(self._run_lane(lane, until))

    async def _run_lane(self, lane: int, until: asyncio.Event) -> None:
        seed = lane << 32
        while not until.is_set():
            seed += 1
            prompt = [1 + (seed * 17 + lane * 131 + place * 7) % 998 for place in range(20 + seed % 100)]
            sampling = SamplingParams(max_tokens=_TOKENS, seed=seed)
            request = GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)
            got = await self._router.generation.generate(request)
            assert list(got.choices[0].token_ids) == answer(prompt, _TOKENS, seed=seed)
            self.moves += got.final.moves


@pytest.fixture
def groups() -> Iterator[dict[str, tuple[int, str]]]:
    """Two groups: the process id and the address of each, by name."""
    with ExitStack() as ends:
        found = {}
        for name in ("group-0", "group-1"):
            command = [sys.executable, "-m", "tests.cluster.slow_group", name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
            ends.enter_context(process)
            ends.callback(process.kill)
            assert process.stdout is not None
            found[name] = (process.pid, process.stdout.readline().strip())
        yield found


@pytest.mark.full  # what is usual for a step takes its time to be known
async def test_a_group_that_is_slow_and_not_silent_is_put_out(
    tmp_path: Path, groups: dict[str, tuple[int, str]]
) -> None:
    """A group that is suspended for nine tenths of the time is ejected within half a minute, because of its step times.
    Its streams continue at the other group token for token, and none fails."""
    router = Router(RouterConfig(model="tiny"), TokenizerJson.load(str(write_model(tmp_path))))
    await router.start()
    await router.set_groups([GroupEndpoint(name, address) for name, (_, address) in groups.items()])
    while len(router.groups.serving()) < 2:
        await router.groups.next_change.wait()
    streams, enough = Streams(router), asyncio.Event()
    running = asyncio.create_task(streams.run_streams(enough))
    await asyncio.sleep(20)
    slow = max(router.groups.connections, key=lambda link: link.load.last_report.status.generated_tokens)
    slowing = asyncio.create_task(_slow(groups[slow.name][0]))
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not slow.ejections:
            await router.groups.next_change.wait()
    reason = slow.detach_reason
    assert [link.name for link in router.groups.serving()] == [name for name in groups if name != slow.name]
    await asyncio.sleep(2)
    enough.set()
    slowing.cancel()
    await running
    await router.stop()
    assert "times as long as they used to, those of the groups beside it 1." in reason
    assert streams.moves > 0


async def _slow(pid: int) -> None:
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.45)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
