"""LoadGenerator: sends jobs to running routers and notes when each message of each answer came.

It shares two cores with the server that it measures, so a token costs one clock reading: messages stay raw bytes
until the run is over. It does not know what a request asks, nor what the figures will be.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from coatcheck.cluster.benchmark.workload import BenchRequest
from coatcheck.cluster.client.async_client import OPTIONS
from coatcheck.cluster.client.credentials import Credentials

INTERRUPTED = "INTERRUPTED"
METHOD = "/coatcheck.v1.Generation/GenerateStream"


@dataclass(slots=True)
class Recording:
    """One request as it went. Times are seconds since the run's start; `due` is when it should have been sent."""

    due: float
    sent: float
    output_len: int
    times: list[float] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    ended: float = 0.0
    # A gRPC status name, or INTERRUPTED: the load itself was cancelled.
    status: str = "OK"
    details: str = ""


class LoadGenerator:
    """One channel per address, asked in turn. An async context manager that owns them."""

    def __init__(
        self, addresses: Sequence[str], access: Credentials | None = None, *, timeout: float | None = None
    ) -> None:
        access = access or Credentials()
        self._metadata = access.metadata
        self._channels = [access.channel(address, OPTIONS) for address in addresses]
        # Without serializers grpc takes and hands over the bytes as they are.
        self._calls = [channel.unary_stream(METHOD, None, None) for channel in self._channels]
        self._timeout = timeout
        self.recordings: list[Recording] = []
        self.finished = 0

    async def __aenter__(self) -> "LoadGenerator":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def closed(self, jobs: Sequence[BenchRequest], concurrency: int) -> float:
        """Keeps `concurrency` requests running until all are answered; returns the seconds it took."""
        begin = time.perf_counter()
        waiting = iter(enumerate(jobs))

        async def client() -> None:
            for index, job in waiting:
                await self._send(index, job, begin, time.perf_counter() - begin)

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
        return time.perf_counter() - begin

    async def open(self, jobs: Sequence[BenchRequest], concurrency: int | None = None) -> float:
        """Sends each job at its time, however many still run (or at most `concurrency`); returns the seconds."""
        begin = time.perf_counter()
        room = asyncio.Semaphore(concurrency) if concurrency else None

        async def client(index: int, job: BenchRequest) -> None:
            if room is None:
                await self._send(index, job, begin, job.at)
            else:
                async with room:
                    await self._send(index, job, begin, job.at)

        async with asyncio.TaskGroup() as clients:
            for index, job in enumerate(jobs):
                await asyncio.sleep(max(0.0, begin + job.at - time.perf_counter()))
                clients.create_task(client(index, job))
        return time.perf_counter() - begin

    async def _send(self, index: int, job: BenchRequest, begin: float, due: float) -> None:
        clock: Callable[[], float] = time.perf_counter
        recording = Recording(due, clock() - begin, job.output_len)
        self.recordings.append(recording)
        note_time, note_message = recording.times.append, recording.messages.append
        call: Any = self._calls[index % len(self._calls)](job.request, timeout=self._timeout, metadata=self._metadata)
        try:
            async for message in call:
                note_time(clock() - begin)
                note_message(message)
        except grpc.aio.AioRpcError as error:
            recording.status = error.code().name
            recording.details = error.details() or ""
        except asyncio.CancelledError:
            recording.status = INTERRUPTED
            raise
        finally:
            recording.ended = clock() - begin
            self.finished += 1
