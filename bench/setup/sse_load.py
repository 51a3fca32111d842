"""Streams of /v1/completions over plain sockets, with the arrival time of each piece.

This load shares two cores with the server that it measures, so it does as little as the gRPC load generator does: bytes
are kept as they come and read only after the run. It is the same for every server.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from coatcheck.bench.setup.checkpoint import VOCABULARY
from coatcheck.bench.setup.scenario import Figures, Scenario
from coatcheck.cluster.benchmark.load_generator import Recording
from coatcheck.cluster.benchmark.request_generator import BenchRequest, RequestGenerator
from coatcheck.proto.stubs import coatcheck_pb2 as pb


@dataclass(slots=True)
class Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    request: bytes
    began: float
    recording: Recording
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Record the bytes and when they arrived."""
        self.recording.times.append(time.perf_counter() - self.began)
        self.recording.messages.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The request asks the server to close the connection after the answer."""
        self.recording.ended = time.perf_counter() - self.began
        self.done.set()


def run_scenario(address: str, scenario: Scenario, seed: int) -> Figures:
    """Run a scenario once. Raises RuntimeError if a request is not answered."""
    work = RequestGenerator(
        VOCABULARY,
        seed=seed,
        prompts="shared-prefix" if scenario.prefixes else "random",
        input_len=scenario.input_len,
        output_len=scenario.output_len,
        num_prefixes=max(1, scenario.prefixes),
        prefix_len=scenario.prefix_len,
    )
    requests = work.build_requests(scenario.requests)
    began = time.perf_counter()
    recordings = asyncio.run(run_sse(address, requests, scenario.clients))
    return _figures(recordings, scenario.output_len, time.perf_counter() - began)


async def run_sse(address: str, requests: Sequence[BenchRequest], concurrency: int) -> list[Recording]:
    """Keep `concurrency` streams running until all requests are answered. Raises RuntimeError if one was not."""
    host, _, port = address.rpartition(":")
    loop, began, waiting = asyncio.get_running_loop(), time.perf_counter(), iter(requests)
    recordings: list[Recording] = []

    async def client() -> None:
        for request in waiting:
            now = time.perf_counter() - began
            recording = Recording(now, now, request.output_len)
            stream = Stream(_request(address, request), began, recording)
            await loop.create_connection(lambda stream=stream: stream, host, int(port))  # type: ignore[misc]
            await stream.done.wait()
            recordings.append(recording)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    for recording in recordings:
        whole = b"".join(recording.messages)
        if not whole.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in whole:
            raise RuntimeError(f"a stream was not answered: {whole[-300:]!r}")
    return recordings


def _request(address: str, request: BenchRequest) -> bytes:
    asked = pb.GenerateRequest.FromString(request.message)
    body = json.dumps({
        "prompt": list(asked.token_ids.ids), "max_tokens": asked.sampling.max_tokens, "stream": True,
        "temperature": asked.sampling.temperature, "ignore_eos": True,
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _figures(recordings: Sequence[Recording], output_len: int, seconds: float) -> Figures:
    """The medians over streams that each have `output_len` tokens, in an answer to all that took `seconds`."""
    ttft, tpot = [], []
    for recording in recordings:
        # The first piece may have the head of the response alone.
        pairs = zip(recording.times, recording.messages, strict=True)
        times = [at for at, message in pairs if b"data: " in message]
        ttft.append(times[0] - recording.due)
        tpot.append((times[-1] - times[0]) / (output_len - 1))
    return Figures(statistics.median(ttft) * 1e3, statistics.median(tpot) * 1e3, output_len * len(recordings) / seconds)
