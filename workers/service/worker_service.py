"""WorkerService: the gRPC service of a group's rank 0. Each router attaches with one stream, a RouterSession.

The service has a thread of its own with an event loop. The engine's thread calls `publish` after each step and
`send_failure_notice` when the engine fails. `publish` builds the step's messages, wakes the event loop once, and never
waits for a stream. A router gets one batch of tokens for each step, or several if a step has many log-probabilities.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from typing import Final

import grpc.aio

from coatcheck.proto.contract import contract_mismatch
from coatcheck.proto.internal_tls import ClusterCertificate, add_internal_port
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from coatcheck.proto.tracing import Tracing
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.service.group_report import LOAD_SECONDS, GroupReport, LoadReportSchedule
from coatcheck.workers.service.request_log import RequestLog
from coatcheck.workers.service.router_session import Outgoing, RouterSession, SessionTable

# The outputs of one step must fit, or every request of the router is lost. The log-probabilities of all of 128,256
# tokens for 100 sequences take 49 MiB.
BUFFER_BYTES: Final = 64 << 20
_FAILURE_NOTICE_SECONDS: Final = 0.25
_END_STREAMS_SECONDS: Final = 2.0

_Stream = grpc.aio.ServicerContext[wire.ToGroup, wire.FromGroup]


class WorkerService(WorkerServicer):
    """Create the service, then an EngineLoop with `publish` as its `on_step`, then `start` the service.

    `buffer_bytes`: a router that leaves more bytes than this unread is disconnected.
    `max_open`: limit on the running and waiting requests of all routers together. The group refuses more; a router
    keeps a refused request in its own queue.
    """

    def __init__(
        self,
        report: GroupReport,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        certificate: ClusterCertificate | None = None,
        tracing: Tracing | None = None,
        max_open: int = 1 << 16,
    ) -> None:
        self.address = ""
        self.table = SessionTable(report.registration, RequestLog(report.registration.group, tracing), max_open)
        self._report = report
        self._buffer_bytes = buffer_bytes
        self._certificate = certificate
        self._num_attached = 0  # since the start
        self._streams: set[asyncio.Task[object]] = set()
        # The next three are those after the last step whose messages are in the outboxes.
        self._stats: EngineStats | None = None
        self._num_processed: dict[int, int] = {}  # submissions that the stats include, by session
        self._all_processed = 0  # those of all routers since the start
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self._server: grpc.aio.Server
        self._engine: EngineLoop
        self._load_task: asyncio.Task[None]

    def start(self, engine: EngineLoop, listen: str) -> str:
        """Serve on `listen` (host:port; port 0 picks a free one). Return host:port."""
        self._engine = engine
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start_server(listen), self._loop).result()
        return self.address

    def stop(self) -> None:
        """End every stream, log the requests that end with them, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._stop_server(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def publish(self, output: StepOutput, stats: EngineStats) -> None:
        """Send a step's tokens, events and refusals. In the engine's thread."""
        num_processed = {number: session.num_processed for number, session in self.table.sessions.items()}
        messages = self.table.build_messages(output)
        all_processed = self.table.num_processed
        self._loop.call_soon_threadsafe(self._put_messages, messages, stats, num_processed, all_processed)

    def send_failure_notice(self, reason: str, unstarted: Collection[str]) -> None:
        """Tell every router why the group ends and which of the router's requests had not started. End every stream.
        `unstarted`: engine request ids. Submissions that the engine has not read are added to them. In the engine's
        thread, or in the watchdog's if a step hangs; takes at most _FAILURE_NOTICE_SECONDS."""
        sent = asyncio.run_coroutine_threadsafe(self._send_failure_notice(reason, unstarted), self._loop)
        with suppress(TimeoutError):
            sent.result(_FAILURE_NOTICE_SECONDS)

    async def Attach(self, requests: AsyncIterator[wire.ToGroup], stream: _Stream) -> None:
        """Serve one router until either side ends the stream; then abort its requests."""
        hello = await self._receive_hello(requests, stream)
        if (task := asyncio.current_task()) is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        self._num_attached += 1
        session = RouterSession(self._num_attached, hello.router, self.table, self._engine, self._buffer_bytes)
        await session.run(requests, stream.write)
        if session.outbox.overflowed.is_set():
            await stream.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"router {hello.router!r} left more than {self._buffer_bytes} bytes unread; attach again",
            )

    async def _receive_hello(self, requests: AsyncIterator[wire.ToGroup], stream: _Stream) -> wire.Hello:
        """The router's first message. Ends the stream unless it is a Hello of the same contract."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello")
        assert first is not None  # abort raises
        if reason := contract_mismatch(f"router {first.hello.router}", first.hello.contract, first.hello.version):
            await stream.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return first.hello

    async def _start_server(self, listen: str) -> None:
        # Keepalive detects within 35 s that a router's host was lost without closing the connection. A router that is
        # suspended or swapped out for a shorter time keeps its requests.
        self._server = grpc.aio.server(
            options=[
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 25_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.so_reuseport", 0),
            ]
        )
        add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # protoc writes no types
        port = add_internal_port(self._server, listen, self._certificate)
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._load_task = asyncio.create_task(self._report_load())

    async def _stop_server(self) -> None:
        self._load_task.cancel()
        await self._server.stop(grace=0.2)
        if self._streams:  # gRPC does not wait until its handlers have returned
            await asyncio.wait(self._streams, timeout=_END_STREAMS_SECONDS)

    async def _send_failure_notice(self, reason: str, unstarted: Collection[str]) -> None:
        for session in self.table.sessions.values():
            requests = [(key, self.table.requests[key]) for key in session.open_requests()]
            # The engine may have failed while it processed the first submission that it has not counted.
            first = session.num_processed + 1
            ids = [request.submit_id for key, request in requests if key in unstarted or request.number > first]
            session.outbox.put_last_message(
                wire.FromGroup(failure_notice=wire.FailureNotice(reason=reason, unstarted=ids))
            )
        await self._server.stop(grace=_FAILURE_NOTICE_SECONDS)

    def _put_messages(
        self, messages: Sequence[Outgoing], stats: EngineStats, num_processed: dict[int, int], all_processed: int
    ) -> None:
        # Messages first, so that a load report follows the outputs of its own step.
        for session, message in messages:
            session.outbox.put_message(message)
        self._stats, self._num_processed, self._all_processed = stats, num_processed, all_processed
        self.table.queued_tokens.update(stats.queued_prefill_tokens, all_processed)

    async def _report_load(self) -> None:
        schedule = LoadReportSchedule(self._report.registration.max_batch_tokens)
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            stats, now = self._stats, time.monotonic()
            if stats is None or not self.table.sessions:
                continue
            if schedule.is_due(stats, now, now - self._engine.last_step_at):
                # As a callback, which runs after any registration that a session has queued.
                self._loop.call_soon(self._send_load, list(self.table.sessions.values()))

    def _send_load(self, sessions: Sequence[RouterSession]) -> None:
        """Send the load after the last published step to each router."""
        assert self._stats is not None, "a load is due only after a step"
        for session in sessions:
            processed = self._num_processed.get(session.number, 0)
            load = self._report.build_load(self._stats, self.address, processed, self._all_processed)
            session.outbox.put_message(wire.FromGroup(load=load))
