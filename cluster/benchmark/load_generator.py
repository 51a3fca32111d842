"""LoadGenerator: sends requests to running routers and records the arrival time of every message.

The generator may share its cores with the server that it measures. Therefore a message costs one clock reading, and is
parsed only after the run.
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
    """Sends requests round-robin over one channel per address. An async context manager, which closes the channels."""

    def __init__(
        self, addresses: Sequence[str], access: Credentials | None = None, *, timeout: float | None = None
    ) -> None:
        access = access or Credentials()
        self._metadata = access.metadata
        self._channels = [access.channel(address, OPTIONS) for address in addresses]
        # Without serializers grpc passes bytes through.
        self._calls = [channel.unary_stream(METHOD, None, None) for channel in self._channels]
        self._timeout = timeout
        self.recordings: list[Recording] = []
        self.finished = 0

    async def __aenter__(self) -> "LoadGenerator":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def run_closed_loop(self, jobs: Sequence[BenchRequest], concurrency: int) -> float:
        """Keep `concurrency` requests running until all have ended. Return the duration in seconds."""
        begin = time.perf_counter()
        waiting = iter(enumerate(jobs))

        async def client() -> None:
            for index, job in waiting:
                await self._send(index, job, begin, time.perf_counter() - begin)

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(jobs)))))
        return time.perf_counter() - begin

    async def run_open_loop(self, jobs: Sequence[BenchRequest], concurrency: int | None = None) -> float:
        """Send each job at its time `at`, at most `concurrency` at once if given. Return the duration in seconds."""
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
        add_time, add_message = recording.times.append, recording.messages.append
        call: Any = self._calls[index % len(self._calls)](job.request, timeout=self._timeout, metadata=self._metadata)
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
            self.finished += 1
