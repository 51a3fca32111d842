"""Cost of HTTP over gRPC, and of structured output: one server, the same requests, alternating runs.

    python bench/router_cases/protocols.py [--json bench/results/protocols.json]

The 82M checkpoint of bench/engine.py. A stream's time per token is from its first piece of text to its last, over the
tokens between them; both clients only keep bytes while the run lasts.
"""

import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.servers import CoatcheckServer
from coatcheck.bench.setup.sse_load import run_sse
from coatcheck.cluster.benchmark.load_generator import LoadGenerator, Recording
from coatcheck.cluster.benchmark.request_generator import BenchRequest, RequestGenerator
from coatcheck.proto.stubs import coatcheck_pb2 as pb

_SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array",
                       "items": {"enum": ["red", "green", "blue"]}}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each; the medians over them count.")] = 4,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure both."""
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint((checkpoint or Path(scratch) / "llama-82m").resolve())
        with CoatcheckServer(directory, Path(scratch)) as server:
            assert isinstance(server, CoatcheckServer)
            found = asyncio.run(measure(server, rounds))
    for name, runs in found.items():
        print(f"{name:24} {statistics.median(runs):8.2f}   {' '.join(f'{run:.2f}' for run in runs)}")
    middle = {name: statistics.median(runs) for name, runs in found.items()}
    tpot = middle["http, ms a token"] / middle["grpc, ms a token"] - 1
    cost = 1 - middle["structured, tokens/s"] / middle["free, tokens/s"]
    print(f"HTTP adds {tpot:+.1%} to the time per token of gRPC at 32 streams; at most 15%")
    print(f"structured output costs {cost:.1%} of the decode throughput at 16 streams; at most 10%")
    write_results(json_path, {**describe_machine(), "runs": found, "http_adds": tpot, "structured_costs": cost})


async def measure(server: CoatcheckServer, rounds: int) -> dict[str, list[float]]:
    """Each kind's figure of every round; the first round of all is not counted."""
    found: dict[str, list[float]] = {
        "grpc, ms a token": [], "http, ms a token": [], "free, tokens/s": [], "structured, tokens/s": [],
    }  # fmt: skip
    for turn in range(rounds + 1):
        work = RequestGenerator(VOCABULARY, seed=turn, input_len=16, output_len=128)
        requests, few = work.build_requests(32), work.build_requests(16)
        figures = [
            time_per_token(await over_grpc(server.address, requests), skip=1),
            time_per_token(await run_sse(server.http_address, requests, 32), skip=0),
            throughput(await over_grpc(server.address, few)),
            throughput(await over_grpc(server.address, [structured(request) for request in few])),
        ]
        if turn:
            for runs, figure in zip(found.values(), figures, strict=True):
                runs.append(figure)
    return found


async def over_grpc(address: str, requests: Sequence[BenchRequest]) -> list[Recording]:
    """Run all requests at once."""
    async with LoadGenerator([address]) as load:
        await load.run_closed_loop(requests, len(requests))
        assert all(recording.status == "OK" for recording in load.recordings), load.recordings[0].details
        return load.recordings


def structured(request: BenchRequest) -> BenchRequest:
    """The same request with a schema whose JSON does not end before max_tokens."""
    message = pb.GenerateRequest.FromString(request.message)
    message.sampling.ClearField("ignore_eos")
    message.sampling.structured.json_schema = json.dumps(_SCHEMA)
    return BenchRequest(request.at, message.SerializeToString(), request.output_len)


def time_per_token(recordings: Sequence[Recording], skip: int) -> float:
    """Milliseconds, the median over streams; `skip` messages come before the first token."""
    spans = [(each.times[-1] - each.times[skip]) / (each.output_len - 1) for each in recordings]
    return statistics.median(spans) * 1e3


def throughput(recordings: Sequence[Recording]) -> float:
    """Tokens a second while all decode: from the last stream's first token to the first stream's last."""
    begin, end = max(each.times[1] for each in recordings), min(each.times[-1] for each in recordings)
    times = [at for each in recordings for at in each.times[1:-1] if begin <= at <= end]
    tokens = sum(count_tokens(each, begin, end) for each in recordings)
    return tokens / (end - begin) if times else 0.0


def count_tokens(recording: Recording, begin: float, end: float) -> int:
    """Tokens of one stream between two times."""
    events = zip(recording.times, map(pb.GenerateEvent.FromString, recording.messages), strict=True)
    return sum(len(event.delta.token_ids) for at, event in events if begin < at <= end)


if __name__ == "__main__":
    typer.run(main)
