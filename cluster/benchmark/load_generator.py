"""LoadGenerator: sends requests to running routers and records the arrival time of every message.

The generator may share its cores with the server that it measures. Therefore a message costs one clock reading, and is
parsed only after the run.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from coatcheck.cluster.benchmark.request_generator import BenchRequest
from coatcheck.cluster.client.async_client import OPTIONS
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.router.config import MAX_STREAMS

INTERRUPTED = "INTERRUPTED"
METHOD = "/coatcheck.v1.Generation/GenerateStream"
# Requests take the channels in turn, however long they run, so at times a channel has more than its share of them.
_SHARE_OF_CHANNEL: Final = MAX_STREAMS // 2
_MAX_CHANNELS: Final = 64  # of an address; each is a connection, and a process can often open only 1,024 files


@dataclass(slots=True)
class Recording:
    """One request. Times are seconds since the start of the run. `due`: when the request should have been sent."""

    due: float
    sent: float
    output_len: int
    times: list[float] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    ended: float = 0.0
    # A gRPC status name, or INTERRUPTED if the run was cancelled.
    status: str = "OK"
    details: str = ""


class LoadGenerator:
    """Sends requests round-robin over the channels of all addresses. An async context manager, which closes them.

    `concurrency`: the most requests that run at once. A router serves MAX_STREAMS calls of one channel at once, so an
    address has a channel for each half of MAX_STREAMS of its share of the requests, and at most 64 channels.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials | None = None,
        *,
        timeout: float | None = None,
        concurrency: int = 1,
    ) -> None:
        credentials = credentials or Credentials()
        self._metadata = credentials.metadata
        channels = min(math.ceil(concurrency / len(addresses) / _SHARE_OF_CHANNEL), _MAX_CHANNELS)
        self._channels = [credentials.channel(address, OPTIONS) for _ in range(channels) for address in addresses]
        # Without serializers grpc passes bytes through.
        self._calls = [channel.unary_stream(METHOD, None, None) for channel in self._channels]
        self._timeout = timeout
        self.recordings: list[Recording] = []
        self.on_end: Callable[[], None] = lambda: None  # called when a request has ended

    async def __aenter__(self) -> "LoadGenerator":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def run_closed_loop(self, requests: Sequence[BenchRequest], concurrency: int) -> float:
        """Keep `concurrency` requests running until all have ended. Return the duration in seconds."""
        begin = time.perf_counter()
        waiting = iter(enumerate(requests))

        async def client() -> None:
            for index, request in waiting:
                await self._send(index, request, begin, time.perf_counter() - begin)

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(requests)))))
        return time.perf_counter() - begin

    async def run_open_loop(self, requests: Sequence[BenchRequest], concurrency: int | None = None) -> float:
        """Send each request at its time `at`, with at most `concurrency` running. Return the duration in seconds."""
        begin = time.perf_counter()
        room = asyncio.Semaphore(concurrency or len(requests))

        async def client(index: int, request: BenchRequest) -> None:
            async with room:
                await self._send(index, request, begin, request.at)

        async with asyncio.TaskGroup() as clients:
            for index, request in enumerate(requests):
                await asyncio.sleep(max(0.0, begin + request.at - time.perf_counter()))
                clients.create_task(client(index, request))
        return time.perf_counter() - begin

    async def _send(self, index: int, request: BenchRequest, begin: float, due: float) -> None:
        clock: Callable[[], float] = time.perf_counter
        recording = Recording(due, clock() - begin, request.output_len)
        self.recordings.append(recording)
        add_time, add_message = recording.times.append, recording.messages.append
        method = self._calls[index % len(self._calls)]
        call: Any = method(request.message, timeout=self._timeout, metadata=self._metadata)
        try:
            async for message in call:
                add_time(clock() - begin)
                add_message(message)
        except grpc.aio.AioRpcError as error:
            recording.status = error.code().name
            recording.details = error.details() or ""
        except asyncio.CancelledError:
            recording.status = INTERRUPTED
            raise
        finally:
            recording.ended = clock() - begin
            self.on_end()
