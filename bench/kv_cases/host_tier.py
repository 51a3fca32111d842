"""Benefit and cost of the host tier, through the whole server: gRPC, router, Ray, one group of one rank.

    python bench/kv_cases/host_tier.py ttft|itl|throughput [--json bench/results/host_tier.json]

The 82M checkpoint: 12,288 bytes of KV a token, 1 GiB is 87,381 tokens. `ttft`: a prefix of 8,192 tokens computed, and
the same from host memory. `itl`: the gaps of running chats alone, and while 1 GiB comes back. `throughput`: prompts
that never repeat, with a pool so small that every block is demoted, and the same without the tier; in wall time, and
in the rank's CPU time, which other work on the machine disturbs less.
"""

import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.results_file import update_results
from coatcheck.bench.setup.scenario import Scenario
from coatcheck.bench.setup.servers import CoatcheckServer
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub

_PREFIX = 8192
_CONTEXT = 32_768
_GIB_OF_PREFIXES = 11  # of 100.7 MB each
_CHATS = 4
_LOAD = Scenario(16, 16, 512, 32)


def main(
    what: Annotated[str, typer.Argument(help="ttft, itl or throughput.")],
    rounds: Annotated[int, typer.Option(help="Rounds of ttft and throughput.")] = 3,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure one part."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # ends the servers too
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint((checkpoint or Path(scratch) / "llama-82m-long").resolve(), _CONTEXT)
        parts: dict[str, Callable[[Path, Path, int], dict[str, Any]]] = {
            "ttft": ttft,
            "itl": itl,
            "throughput": throughput,
        }
        figures = parts[what](directory, Path(scratch), rounds)
    print(json.dumps(figures, indent=1))
    update_results(json_path, **{what: figures})


def ttft(checkpoint: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Five prefixes in turn through a pool that holds two and a half: computed once, then restored from the host.

    With LRU eviction each prefix has left the pool before its next turn.
    """
    prompts = [prompt(seed) for seed in range(5)]
    with CoatcheckServer(checkpoint, scratch, "--kv-memory 256MiB --host-kv-memory 1GiB --eviction lru") as server:
        send_prompt(server, prompt(99)[:600], 1)
        cold = [send_prompt(server, tokens, 1) for tokens in prompts]
        warm = [send_prompt(server, tokens, 1) for _ in range(rounds) for tokens in prompts]
        status = server.status()
    assert all(answer.usage.cached_host_tokens == _PREFIX for answer in warm), "not all came from the host"
    computed, restored = (statistics.median(a.times[0] for a in answers) * 1e3 for answers in (cold, warm))
    return {
        "prefix_tokens": _PREFIX,
        "computed_ttft_ms": computed,
        "restored_ttft_ms": restored,
        "restored_ttft_ms_worst": max(a.times[0] for a in warm) * 1e3,
        "times_lower": computed / restored,
        "restore_gb_per_second": status.restore_bytes_per_second / 1e9,
        "demote_gb_per_second": status.demote_bytes_per_second / 1e9,
        "prefill_tokens_per_second": status.prefill_tokens_per_second,
        "restore_tokens_per_second": status.restore_tokens_per_second,
    }


def itl(checkpoint: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Chats that decode alone, and then while eleven prefixes, 1 GiB in all, come back one after another."""
    prompts = [prompt(seed) for seed in range(_GIB_OF_PREFIXES)]
    with CoatcheckServer(checkpoint, scratch, "--kv-memory 384MiB --host-kv-memory 2.5GiB --eviction lru") as server:
        for tokens in prompts:
            send_prompt(server, tokens, 1)
        for seed in range(2):  # evicts the last of them too
            send_prompt(server, prompt(50 + seed), 1)
        before, chats = server.status().restores, [Chat(server, seed) for seed in range(_CHATS)]
        wait_for(lambda: all(chat.times for chat in chats))
        time.sleep(4.0)
        began = time.perf_counter()
        answers = [send_prompt(server, tokens, 1) for tokens in prompts]
        ended = time.perf_counter()
        time.sleep(4.0)
        status = server.status()
        for chat in chats:
            chat.stop()
    alone = [gap for chat in chats for gap in chat.gaps(0.0, began) + chat.gaps(ended, float("inf"))]
    beside = [gap for chat in chats for gap in chat.gaps(began, ended)]
    return {
        "restored_bytes": (status.restores - before) * status.bytes_per_block,
        "restore_seconds": ended - began,
        "ttft_ms": statistics.median(a.times[0] for a in answers) * 1e3,
        "alone_ms": percentiles(alone),
        "beside_ms": percentiles(beside),
        "p99_ratio": percentiles(beside)["p99"] / percentiles(alone)["p99"],
    }


def throughput(checkpoint: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second of 16 clients whose prompts never repeat. Both servers run and take turns."""
    flags = "--kv-memory 160MiB"
    seen: dict[str, list[float]] = {"off": [], "on": []}
    busy: dict[str, list[float]] = {"off": [], "on": []}
    (scratch / "on").mkdir()
    with (
        CoatcheckServer(checkpoint, scratch, flags) as off,
        CoatcheckServer(checkpoint, scratch / "on", f"{flags} --host-kv-memory 1GiB") as on,
    ):
        servers = {"off": off, "on": on}
        for server in servers.values():
            server.run(_LOAD, seed=1000)
        for turn in range(rounds):
            for name in sorted(servers, reverse=turn % 2 == 1):
                began = processor_seconds(servers[name])
                seen[name].append(servers[name].run(_LOAD, seed=turn).tokens_per_second)
                busy[name].append(processor_seconds(servers[name]) - began)
        demotions = on.status().demotions
    medians = {name: statistics.median(runs) for name, runs in seen.items()}
    pairs = [b / a for a, b in zip(busy["off"], busy["on"], strict=True)]
    return {
        "tokens_per_second": seen,
        "medians": medians,
        "on_over_off": medians["on"] / medians["off"],
        "processor_seconds": busy,
        "processor_on_over_off": statistics.median(pairs),
        "demoted_blocks": demotions,
    }


class TimedReply:
    """`times`: seconds from sending the request to each message with tokens."""

    def __init__(self, times: list[float], usage: pb.Usage) -> None:
        self.times = times
        self.usage = usage


class Chat:
    """A stream that a thread reads until it is stopped."""

    def __init__(self, server: CoatcheckServer, seed: int) -> None:
        self.times: list[float] = []
        self._stream = stream(server, prompt(1000 + seed)[:64], 20_000)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between neighbouring messages that both came from `since` to `until`."""
        inside = [when for when in self.times if since <= when <= until]
        return [b - a for a, b in pairwise(inside)]

    def stop(self) -> None:
        self._stream.cancel()
        self._thread.join()

    def _read(self) -> None:
        try:
            for event in self._stream:
                if event.HasField("delta"):
                    self.times.append(time.perf_counter())
        except Exception as error:
            assert "CANCELLED" in str(error), error


def processor_seconds(server: CoatcheckServer) -> float:
    """CPU seconds of all threads of the group's only rank, so far."""
    fields = Path(f"/proc/{server.status().ranks[0].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send_prompt(server: CoatcheckServer, tokens: list[int], max_tokens: int) -> TimedReply:
    """Run one request to its end."""
    began, times, usage = time.perf_counter(), [], pb.Usage()
    for event in stream(server, tokens, max_tokens):
        if event.HasField("delta"):
            times.append(time.perf_counter() - began)
        elif event.HasField("final"):
            usage = event.final.usage
    return TimedReply(times, usage)


def stream(server: CoatcheckServer, tokens: list[int], max_tokens: int) -> Any:
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    stub: Any = GenerationStub(server.channel)  # type: ignore[no-untyped-call]  # made by protoc
    return stub.GenerateStream(pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling=sampling))


def prompt(seed: int) -> list[int]:
    """_PREFIX + 1 random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(_PREFIX + 1)]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    named = {f"p{p}": cuts[p - 1] * 1e3 for p in (50, 90, 99)}
    return {**named, "largest": max(seconds) * 1e3, "gaps": len(seconds)}


def wait_for(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


if __name__ == "__main__":
    typer.run(main)
