"""A burst over HTTP of 1,500 requests at once, each on a connection of its own."""

import asyncio
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.router.access.key_file import hash_key
from tests.router.http_router import StartHttpRouter
from tests.router.queueing_group import QueueingGroup

SLOTS, WAITING = 8, 4  # the most requests that run in a group, and that wait in it
ROOM = 2 * (SLOTS + WAITING)  # of two groups
REQUESTS, QUEUED = 1500, 1024
# Connections may take half of a router's files; some are left for its groups.
FILES = 2 * (REQUESTS + 200)
PROMPT = {"model": "tiny", "max_tokens": 2, "seed": 1}

Answers = list[tuple[int, str, float]]


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Raises this process's limit of open files as far as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(
            f"{REQUESTS} connections need {FILES} open files, and the hard limit here is {hard}; see ulimit -Hn"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def sent(
    address: str, held: int, *burst: tuple[int, str, dict[str, object]]
) -> AsyncIterator[Callable[[], Awaitable[Answers]]]:
    """Sends requests of each kind: (number, key, body). Yields a function that first returns the answers once at most
    `held` requests have none, and then, in a second call, the others."""
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.router.http.burst_clients", address, str(held), json.dumps(burst)),
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )

    async def answers() -> Answers:
        assert clients.stdout is not None
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            return [(status, retry, seconds) for status, retry, seconds in json.loads(await clients.stdout.readline())]

    try:
        yield answers
    finally:
        if clients.returncode is None:
            clients.kill()
        await clients.communicate()


class RouterProcess:
    """`python -m coatcheck.router.server` with limits of open files, in front of two groups; a context manager."""

    def __init__(self, model: Path, limits: str) -> None:
        self.groups = [QueueingGroup(name, SLOTS) for name in ("g0", "g1")]
        self._model = model
        self._limits = limits  # for `ulimit`
        self.address = ""
        self.said = ""  # on stderr, so far as it was read
        self._more_said = asyncio.Event()

    async def __aenter__(self) -> Self:
        groups = [f"--group={group.name}={(await group.start()).address}" for group in self.groups]
        self.process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f'ulimit {self._limits}; exec "$@"', "sh"),
            *(sys.executable, "-m", "coatcheck.router.server", str(self._model), *groups),
            *("--port", "0", "--http-port", "0", "--served-model-name", "tiny"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reporting = asyncio.create_task(report(self.groups, late=False))
        self._reading = asyncio.create_task(self._read())
        assert self.process.stdout is not None
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            self.address = (await self.process.stdout.readline()).decode().split("http on ")[1].strip()
            for group in self.groups:
                await group.attached()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reporting.cancel()
        self.process.terminate()
        await self.process.wait()
        await self._reading
        for group in self.groups:
            await group.kill()

    def go(self) -> None:
        """Lets the groups answer the requests that they hold."""
        for group in self.groups:
            group.go()

    async def until_said(self, text: str) -> None:
        """Waits until the process has written `text` to stderr."""
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while text not in self.said:
                self._more_said.clear()
                await self._more_said.wait()

    def cpu_seconds(self) -> float:
        """CPU time of the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said += line.decode()
            self._more_said.set()


async def report(groups: Sequence[QueueingGroup], *, late: bool) -> None:
    """Lets each group report its load every 50 ms; `late`: the load that it had before the burst."""
    while True:
        for group in groups:
            if late:
                group.report_late()
            else:
                group.report_load()
        await asyncio.sleep(0.05)


async def test_a_router_that_starts_with_1024_files_serves_1500_connections(model_directory: Path) -> None:
    """A router whose soft limit of open files is 1,024 raises it. Of 1,500 requests the two groups get as many as they
    have room for and 1,024 wait. The others get 429 with Retry-After meanwhile. Each accepted request is answered."""
    held = QUEUED + ROOM
    async with RouterProcess(model_directory, "-S -n 1024") as router:
        async with sent(router.address, held, (REQUESTS, "", PROMPT | {"prompt": [5, 6, 7]})) as answers:
            refused = await answers()
            assert Counter(status for status, _, _ in refused) == {429: REQUESTS - held}
            assert all(int(retry) >= 1 for _, retry, _ in refused)
            assert max(seconds for _, _, seconds in refused) < 60
            router.go()
            assert Counter(status for status, _, _ in await answers()) == {200: held}
    assert [group.most_held for group in router.groups] == [SLOTS + WAITING] * 2
    assert "Traceback" not in router.said


async def test_a_router_that_may_have_1024_files_answers_1500_connections(model_directory: Path) -> None:
    """A router whose hard limit is 1,024 serves 512 connections, and logs a warning at its start. All others get 503,
    no response is lost to a reset, and the accepted requests are answered."""
    async with RouterProcess(model_directory, "-n 1024") as router:
        async with sent(router.address, 512, (REQUESTS, "", PROMPT | {"prompt": [5, 6, 7]})) as answers:
            assert Counter(status for status, _, _ in await answers()) == {503: REQUESTS - 512}
            router.go()
            assert Counter(status for status, _, _ in await answers()) == {200: 512}
    assert [group.most_held for group in router.groups] == [SLOTS + WAITING] * 2
    assert "Traceback" not in router.said
    assert "at most 512 HTTP connections, fewer than max-queued (1024)" in router.said


async def test_a_router_without_a_free_file_waits_for_one(model_directory: Path) -> None:
    """While no file is free for a connection, the router logs one warning, uses little CPU, and goes on. New
    connections wait, and are served when files are free again."""
    async with RouterProcess(model_directory, "-S -n 1024") as router:
        router.go()
        soft_and_hard = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, (3, soft_and_hard[1]))
        async with sent(router.address, 0, (100, "", PROMPT | {"prompt": [5, 6, 7]})) as answers:
            await router.until_said("accept failed: Too many open files")
            before = router.cpu_seconds()
            await asyncio.sleep(1)  # two more tries
            assert router.cpu_seconds() - before < 0.25
            resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE, soft_and_hard)
            assert Counter(status for status, _, _ in await answers()) == {200: 100}
    assert router.said.count("accept failed") == 1 and "Traceback" not in router.said


@pytest.mark.full  # tests/router/test_burst.py has the same decisions by gRPC
async def test_turns_and_priorities_hold_in_a_burst_over_http(
    start_http_router: StartHttpRouter, tmp_path: Path
) -> None:
    """One tenant sends 1,300 of 1,500 requests, and all requests of the two others are accepted. The urgent tenant's
    are sent first as slots become free, then the other tenant gets its half. Reports from before the burst change
    nothing."""
    tenants = [{"name": name, "keys": [hash_key(name)]} for name in ("many", "few")]
    tenants.append({"name": "urgent", "keys": [hash_key("urgent")], "priority": -1})  # type: ignore[dict-item]
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"tenants": tenants}))
    group = QueueingGroup("g0", SLOTS)
    router = await start_http_router(group, max_queued=QUEUED, key_file=str(keys))
    queue = router.server.dispatcher.queue
    kinds = [(REQUESTS - 200, "many", 100), (100, "few", 300), (100, "urgent", 200)]
    burst_of = [(count, key, PROMPT | {"prompt": [first, 5, 6]}) for count, key, first in kinds]
    held = QUEUED + SLOTS + WAITING
    async with sent(router.http_address, held, *burst_of) as answers:
        reports = asyncio.create_task(report([group], late=True))
        assert Counter(status for status, _, _ in await answers()) == {429: REQUESTS - held}
        reports.cancel()
        assert len(queue) == QUEUED and group.most_held == SLOTS + WAITING
        queue.check()
        group.go()
        reports = asyncio.create_task(report([group], late=False))
        assert Counter(status for status, _, _ in await answers()) == {200: held}
        reports.cancel()
    assert group.most_held == SLOTS + WAITING
    order = [submit.prompt_token_ids[0] for submit in group.submits]
    assert order.count(200) == order.count(300) == 100
    turns = order[SLOTS + WAITING :]
    assert turns[:100].count(200) >= 80  # one of eight is taken whatever its priority
    assert turns[115:315].count(300) >= 70  # at most a few were taken before
