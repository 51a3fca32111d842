"""WorkerService: the gRPC service of a group's rank 0.

Routers attach with one stream each; each engine step becomes at most one batch of tokens per router. Two threads meet
here: the engine's calls `publish` and `say_last`, all else runs in the event loop of the service's own thread. Per step
the engine's thread builds messages and wakes the loop once; it never waits for a stream. It does not know what a router
asks for, nor how the other ranks are reached.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress

import grpc.aio

from coatcheck.proto import plane_certificate
from coatcheck.proto.contract import disagreement
from coatcheck.proto.plane_certificate import PlaneCertificate
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from coatcheck.proto.tracing import Tracing
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.load_pace import LOAD_SECONDS, LoadPace
from coatcheck.workers.service.open_requests import OpenRequests
from coatcheck.workers.service.outbox import Outbox
from coatcheck.workers.service.request_log import RequestLog
from coatcheck.workers.service.router_session import Desk, RouterSession
from coatcheck.workers.service.step_mail import Mail, StepMail
from coatcheck.workers.service.wire import refused_message

BUFFER_BYTES = 16 << 20
_LAST_WRITE_SECONDS = 1.0
_LAST_WORD_SECONDS = 0.25

_log = logging.getLogger(__name__)
_Stream = grpc.aio.ServicerContext[wire.ToGroup, wire.FromGroup]


class WorkerService(WorkerServicer):
    """Made before its engine's loop, which calls `publish`; `start` is given that loop. Of all routers together it
    holds at most `max_open` requests, running and waiting, and refuses more: their routers keep those."""

    def __init__(
        self,
        report: GroupReport,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        plane: PlaneCertificate | None = None,
        tracing: Tracing | None = None,
        max_open: int = 1 << 16,
    ) -> None:
        self.address = ""
        self._plane = plane
        self._report = report
        self._registration = report.registration
        self._buffer_bytes = buffer_bytes
        self._max_open = max_open
        self._subscribers: dict[int, Outbox] = {}  # changed by the engine's thread alone
        self._tickets = OpenRequests(RequestLog(self._registration.group, tracing))
        self._attached = 0
        self._streams: set[asyncio.Task[object]] = set()
        self._mail = StepMail(self._registration.epoch, self._tickets)  # the engine's thread owns it
        # Of the last step whose outputs have been put into the subscribers' buffers.
        self._stats: EngineStats | None = None
        self._submissions: dict[int, int] = {}  # subscriber's number -> its submissions that those stats include
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._server: grpc.aio.Server
        self._engine: EngineLoop
        self._desk: Desk
        self._load_task: asyncio.Task[None]

    def start(self, engine: EngineLoop, listen: str) -> str:
        """Serves on `listen` (host:port, 0 for any port) and returns host:port."""
        self._engine = engine
        self._desk = Desk(
            self._registration, engine, self._tickets, self._subscribers, self._mail, self._loop, self._max_open
        )
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(listen), self._loop).result()
        return self.address

    def stop(self) -> None:
        """Ends every stream, with what is noted of its requests then, and after that the thread."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def publish(self, output: StepOutput, stats: EngineStats) -> None:
        """Sends a step's tokens and events to whom they belong. In the engine's thread."""
        submissions = {number: subscriber.submissions for number, subscriber in self._subscribers.items()}
        mail = self._mail.of(output, self._subscribers.values())
        for request_id, error in output.refused:
            if ticket := self._tickets.end(request_id, f"refused: {error}"):
                message = refused_message(ticket.submit_id, ticket.attempt, error)
                self._loop.call_soon_threadsafe(ticket.subscriber.put, message)
        self._loop.call_soon_threadsafe(self._finish_step, mail, stats, submissions)

    def say_last(self, reason: str, waiting: Collection[str]) -> None:
        """The group ends by itself, for that reason, and these requests have no part in it: every router is told, and
        every stream ends. In the engine's thread; returns once that is done, or has taken too long."""
        said = asyncio.run_coroutine_threadsafe(self._say_last(reason, waiting), self._loop)
        with suppress(TimeoutError):
            said.result(_LAST_WORD_SECONDS)

    async def Attach(self, requests: AsyncIterator[wire.ToGroup], stream: _Stream) -> None:
        """One router, until either side ends; then its requests are aborted."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello")
        assert first is not None  # abort raises
        hello = first.hello
        if reason := disagreement(f"router {hello.router}", hello.contract, hello.version):
            await stream.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if (task := asyncio.current_task()) is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        self._attached += 1
        subscriber = Outbox(self._attached, hello.router, buffer_bytes=self._buffer_bytes)
        attachment = RouterSession(self._desk, subscriber)
        ends = [
            asyncio.create_task(attachment.read(requests)),
            asyncio.create_task(subscriber.write_to(stream.write)),
            asyncio.create_task(subscriber.overflowed.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # gRPC cannot end a stream amid a write that was cancelled: the router would wait until it thinks us stuck.
            subscriber.close()
            await asyncio.wait(ends[1:2], timeout=_LAST_WRITE_SECONDS)
            for task in ends:
                task.cancel()
            read, *_ = await asyncio.gather(*ends, return_exceptions=True)
            if isinstance(read, Exception):
                _log.error("the stream of router %r could not be read", subscriber.router, exc_info=read)
            attachment.close()
        if subscriber.overflowed.is_set():
            await stream.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"router {subscriber.router!r} let more than {self._buffer_bytes} bytes pile up; attach anew",
            )

    async def Probe(self, request: wire.ProbeRequest, stream: object) -> wire.ProbeResponse:
        """Answers between two steps, so only while the engine lives; the ranks' first step came before it."""
        stats = await asyncio.wrap_future(self._engine.call(Engine.stats))
        return wire.ProbeResponse(registration=self._registration, status=self._report.status(stats, self.address))

    async def _start(self, listen: str) -> None:
        # A router that vanished without a word is noticed by keepalive within 15 s.
        self._server = grpc.aio.server(
            options=[
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.so_reuseport", 0),
            ]
        )
        add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # protoc writes no types
        port = plane_certificate.listen(self._server, listen, self._plane)
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._load_task = asyncio.create_task(self._publish_load())

    async def _stop(self) -> None:
        self._load_task.cancel()
        await self._server.stop(grace=0.2)
        if self._streams:  # gRPC does not wait for what its handlers still have to do
            await asyncio.wait(self._streams, timeout=2 * _LAST_WRITE_SECONDS)

    async def _say_last(self, reason: str, waiting: Collection[str]) -> None:
        for subscriber in self._subscribers.values():
            keys = [key for key in self._tickets.of(subscriber) if key in waiting]
            ids = [ticket.submit_id for key in keys if (ticket := self._tickets.get(key)) is not None]
            subscriber.end(wire.FromGroup(last_word=wire.LastWord(reason=reason, waiting=ids)))
        await self._server.stop(grace=_LAST_WORD_SECONDS)

    def _finish_step(self, mail: Mail, stats: EngineStats, submissions: dict[int, int]) -> None:
        # Outputs first, so that a load report is sent after the outputs of its step and before later ones.
        for subscriber, message in mail:
            subscriber.put(message)
        self._stats, self._submissions = stats, submissions

    async def _publish_load(self) -> None:
        """For ever: what the pace says is due."""
        pace = LoadPace(self._registration.max_batch_tokens)
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            stats, now = self._stats, time.monotonic()
            if stats is None or not self._subscribers or not pace.is_due(stats, now, now - self._engine.last_step_at):
                continue
            # In its turn: behind the registration of a router that has just attached.
            self._loop.call_soon(self._send_load, list(self._subscribers.values()))

    def _send_load(self, subscribers: Sequence[Outbox]) -> None:
        """Sends each router the load after the last published step, with the number of the router's submissions that
        the load includes."""
        assert self._stats is not None, "a load is due only after a step"
        for subscriber in subscribers:
            submissions = self._submissions.get(subscriber.number, 0)
            load = self._report.load(self._stats, self.address, submissions)
            subscriber.put(wire.FromGroup(load=load))
