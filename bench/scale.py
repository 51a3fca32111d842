"""What a router's decisions, KV events and load reports cost with many groups and many blocks, in one process.

A decision is `Dispatcher.admit` of a request whose block hashes are known. It finds the groups that can run the
request, those that hold its prefix, and its cost on each, and it enters the request in the load and the index. The
index has `--blocks` blocks, spread evenly over the groups. A message of KV events and a load report arrive between two
decisions. The prompt's prefix is cached nowhere, on one group, on the devices of all groups or in the host memory of
all groups, or all groups are computing it. Times are CPU µs on one core.

    python bench/scale.py [--groups 8 --groups 1000] [--blocks 10000000] [--quick] [--json out.json] [--name after]

10^7 blocks take 2 to 3 GiB of memory. `--quick` is for a test: few groups, blocks and decisions.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
from prometheus_client import CollectorRegistry

from coatcheck.bench.router_cases.offline_groups import BLOCK_SIZE, MODEL, OfflineGroups, load_report
from coatcheck.bench.setup.results_file import update_results
from coatcheck.proto.block_hash import HASH_BYTES
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.worker_pb2 import TIER_HOST, FromGroup
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.admission_queue import AdmissionQueue, Attempt
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics

GROUPS: Final = (8, 64, 256, 1000)
BLOCKS: Final = 10_000_000
PROMPTS: Final = {"1k": 1024, "8k": 8192, "100k": 100_000}  # tokens
_PREFIX_BLOCKS: Final = PROMPTS["100k"] // BLOCK_SIZE
_MESSAGE: Final = 64  # blocks in a message of KV events
_CHAIN: Final = 32  # blocks of one prompt in a message of KV events
_QUEUED: Final = 1000  # requests that wait while load reports come
_FULL: Final = 1000  # waiting requests of a group without room
_REPORTS_PER_SECOND: Final = 10  # load reports of a group

Figures = dict[str, float]


class _Router:
    """The parts of one router that decide, with `groups` groups."""

    def __init__(self, groups: int, blocks: int, decisions: int) -> None:
        self.dice = random.Random(1)
        self.blocks = blocks // groups  # blocks that each group holds
        self.decisions = decisions
        self.groups = OfflineGroups(groups, self.blocks + 30 * _PREFIX_BLOCKS)
        self.dispatcher = Dispatcher(self.groups, AdmissionQueue(2 * _QUEUED))
        self.groups.start()
        self._lifecycle = RequestLifecycle(RequestMetrics(CollectorRegistry()))
        self._names = count()
        self._stored = [0] * groups  # how many blocks that no prompt uses each group has stored so far

    def fill(self, mixed: int) -> Figures:
        """Stores the blocks that no prompt uses. Then groups store and remove blocks, `mixed` events in all."""
        memory = psutil.Process().memory_info().rss
        stored = list[float]()
        for place, member in enumerate(self.groups.members):
            while self._stored[place] < self.blocks:
                blocks = self._new_blocks(place, min(_MESSAGE, self.blocks - self._stored[place]))
                message = member.events(blocks, chain_blocks=_CHAIN)
                stored.append(_seconds(member.receive, message))
        memory = psutil.Process().memory_info().rss - memory
        churned = [_seconds(*self._churn()) for _ in range(mixed // _MESSAGE)]
        return {
            "blocks": self.groups.index.entries,
            "bytes_per_block": memory / self.groups.index.entries,
            "stored_events_per_second": self.blocks * len(self._stored) / sum(stored),
            "mixed_events_per_second": mixed // _MESSAGE * _MESSAGE / sum(churned),
            "longest_message_ms": max(stored + churned) * 1e3,
        }

    async def decide(self, requests: Iterator[Request]) -> Figures:
        """Sends requests, and ends each at once."""
        decided, ended = [], []
        for request in islice(requests, self.decisions):
            receive, message = self._churn()
            receive(message)
            self.dice.choice(self.groups.members).receive(load_report(self.blocks))
            attempt = Attempt(request, self._lifecycle)
            started = time.thread_time()
            grant = await self.dispatcher.admit(attempt)
            middle = time.thread_time()
            grant.submission.close(finished=True)
            grant.charge.settle_tokens(0)
            ended.append(time.thread_time() - middle)
            decided.append(middle - started)
        return {
            "p50_us": _percentile(decided, 0.5),
            "p99_us": _percentile(decided, 0.99),
            "end_p50_us": _percentile(ended, 0.5),
        }

    async def report_loads(self, reports: int) -> Figures:
        """Time load reports: of groups with room while no request waits, and of groups without room while requests
        wait."""
        free, full = (load_report(self.blocks, waiting=waiting) for waiting in (0, _FULL))
        idle = self._report(free, reports)
        self._report(full, len(self.groups.members))
        waiting = [
            asyncio.create_task(self.dispatcher.admit(Attempt(self.request(1024), self._lifecycle)))
            for _ in range(_QUEUED)
        ]
        await asyncio.sleep(0)
        assert len(self.dispatcher.queue) == _QUEUED, "a group has room"
        busy = self._report(full, reports)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._report(free, len(self.groups.members))
        return {
            "report_us": idle * 1e6,
            "report_while_full_us": busy * 1e6,
            "cores_while_full": busy * _REPORTS_PER_SECOND * len(self.groups.members),
        }

    def request(self, tokens: int, salt: str = "") -> Request:
        """A request of `tokens` tokens, whose block hashes are known. Requests with one `salt` share their prefix."""
        salt = salt or f"own {next(self._names)}"
        request = Request("r", range(tokens), SamplingParams(max_tokens=1, seed=1), cache_salt=salt)
        request.block_hashes(MODEL)
        return request

    def _report(self, message: FromGroup, reports: int) -> float:
        """Seconds that one report takes."""
        members = self.groups.members
        return sum(_seconds(members[number % len(members)].receive, message) for number in range(reports)) / reports

    def _churn(self) -> tuple[Callable[[FromGroup], None], FromGroup]:
        """A message that stores new blocks on one group and removes as many old ones, and who receives it."""
        place = self.dice.randrange(len(self._stored))
        oldest = self._stored[place] - self.blocks
        removed = [_block(place, oldest + number) for number in range(_CHAIN)]
        member = self.groups.members[place]
        return member.receive, member.events(self._new_blocks(place, _CHAIN), removed)

    def _new_blocks(self, place: int, number: int) -> list[bytes]:
        first = self._stored[place]
        self._stored[place] += number
        return [_block(place, first + later) for later in range(number)]


def _block(place: int, number: int) -> bytes:
    """The hash of a block that no prompt uses."""
    return blake2b(place.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()


def _seconds(receive: Callable[[FromGroup], None], message: FromGroup) -> float:
    started = time.thread_time()
    receive(message)
    return time.thread_time() - started


def _percentile(seconds: Sequence[float], share: float) -> float:
    """The quantile `share` of `seconds`, in µs."""
    return sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)] * 1e6


async def _measure(groups: int, blocks: int, decisions: int, reports: int, mixed: int) -> dict[str, Figures]:
    router = _Router(groups, blocks, decisions)
    members, index = router.groups.members, router.groups.index
    figures = {"events": router.fill(mixed)}
    gc.collect()
    gc.freeze()  # the blocks are not what a collection should look at
    figures["load reports"] = await router.report_loads(reports)

    async def decide(where: str, request: Callable[[int], Request]) -> None:
        for name, tokens in PROMPTS.items():
            figures[f"{where}, {name}"] = await router.decide(request(tokens + 1) for _ in count())

    await decide("nowhere", router.request)
    salts = [f"one group {number}" for number in range(20)]
    for salt in salts:
        member = router.dice.choice(members)
        member.receive(member.events(router.request(PROMPTS["100k"] + 1, salt).block_hashes(MODEL)))
    await decide("one group", lambda tokens: router.request(tokens, router.dice.choice(salts)))

    def of_all(tokens: int) -> Request:
        return router.request(tokens, "all")

    chain = of_all(PROMPTS["100k"] + 1).block_hashes(MODEL)
    for member in members:
        member.receive(member.events(chain))
    await decide("all groups", of_all)
    for member in members:
        member.receive(member.events(chain, tier=TIER_HOST))
        member.receive(member.events((), chain))
    await decide("host memory", of_all)
    for member in members:
        member.receive(member.events((), chain, tier=TIER_HOST))
        index.add_expected(member.name, "expected", chain)
    await decide("in flight", of_all)
    for member in members:
        index.remove_expected(member.name, "expected")
    router.groups.check()
    await router.groups.close()
    gc.unfreeze()
    return figures


def main(
    groups: Annotated[list[int], typer.Option(help="Numbers of groups.")] = list(GROUPS),  # noqa: B006
    blocks: Annotated[int, typer.Option(help="Indexed blocks of all groups.")] = BLOCKS,
    decisions: Annotated[int, typer.Option(help="Decisions of each kind.")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="Few groups, blocks and decisions.")] = False,
    name: Annotated[str, typer.Option(help="Name of these figures in the JSON file.")] = "figures",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print a row for each number of groups and each place of the prefix."""
    reports, mixed = 2000, 400_000
    if quick:
        groups, blocks, decisions, reports, mixed = [2, 16], 4096, 3, 50, 512
    for number in groups:
        measured = asyncio.run(_measure(number, blocks, decisions, reports, mixed))
        for what, row in measured.items():
            print(f"{number} groups, {what}: ", "  ".join(f"{key} {value:,.2f}" for key, value in row.items()))
        update_results(json_path, **{f"{name}, {number} groups": measured})


if __name__ == "__main__":
    typer.run(main)
