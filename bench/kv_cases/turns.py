"""One chat of 40 turns through the whole server: the time to the first token, turn by turn.

    python bench/kv_cases/turns.py [--json bench/results/turns.json]

The 82M checkpoint; every turn adds 48 tokens to the history, and 16 are generated. Turns 2 to 4 and the last three are
compared. `alone`: there are no other requests. `between`: before each compared turn another prompt evicts the chat from
the pool, so that it is restored from the host. `uncached`: each compared turn has a cache salt of its own.
"""

import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.servers import CoatcheckServer
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub

_TURNS, _NEW, _ANSWERED = 40, 48, 16
_CONTEXT = 4096
_EARLY, _LATE = range(1, 4), range(_TURNS - 3, _TURNS)
_POOL = "--kv-memory 44MiB --host-kv-memory 512MiB --eviction lru"  # hardly more than the chat at its end
_OTHER = 3650


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure the three chats."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended early"))  # ends the server too
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint((checkpoint or Path(scratch) / "llama-82m").resolve(), _CONTEXT)
        with CoatcheckServer(directory, Path(scratch), _POOL) as server:
            send_prompt(server, random_tokens(0, 600), 8)
            for name in ("alone", "between", "uncached"):
                figures[name] = chat(server, name)
    print(json.dumps(figures, indent=1))
    write_results(json_path, {**describe_machine(), **figures})


def chat(server: CoatcheckServer, name: str) -> dict[str, Any]:
    """All turns of one chat, in milliseconds."""
    history, ttft, host = list[int](), list[float](), 0
    for turn in range(_TURNS):
        history += random_tokens(1000 + turn, _NEW)
        compared = turn in _EARLY or turn in _LATE
        salt = f"{turn}" if name == "uncached" and compared else name
        if name == "between" and compared:
            send_prompt(server, random_tokens(turn, _OTHER), 1, f"other {turn}")
        seconds, generated, usage = send_prompt(server, history, _ANSWERED, salt)
        history += generated
        ttft.append(seconds * 1e3)
        host += usage.cached_host_tokens
    early, late = (statistics.median(ttft[turn] for turn in turns) for turns in (_EARLY, _LATE))
    return {"turns_2_to_4": early, "turns_38_to_40": late, "creep": late / early, "from_host": host, "ttft_ms": ttft}


def send_prompt(
    server: CoatcheckServer, tokens: list[int], max_tokens: int, salt: str = ""
) -> tuple[float, list[int], pb.Usage]:
    """(seconds to the first token, generated tokens, usage)."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling=sampling, cache_salt=salt)
    stub: Any = GenerationStub(server.channel)  # type: ignore[no-untyped-call]  # made by protoc
    began, first, generated, usage = time.perf_counter(), 0.0, list[int](), pb.Usage()
    for event in stub.GenerateStream(request):
        if event.HasField("delta"):
            first = first or time.perf_counter() - began
            generated += event.delta.token_ids
        elif event.HasField("final"):
            usage = event.final.usage
    return first, generated, usage


def random_tokens(seed: int, count: int) -> list[int]:
    """The same tokens for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    typer.run(main)
