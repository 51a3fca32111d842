"""RouterSession: one router's stream to this group, from its Hello to its end.

    router -> read_messages -> engine loop         submissions, aborts, requests for a snapshot
    router <- outbox                               registration, snapshot, tokens, KV events, load, refusals, returns

SessionTable holds the sessions of a group and their open requests, and turns an engine step into messages. Sessions run
in the event loop of the service's thread. A method that the engine's thread calls says so in its docstring.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.step_output import KvEvent, StepOutput
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.kv.cache_snapshot import CacheSnapshot
from coatcheck.workers.service.message_conversion import (
    CHUNK_BLOCKS,
    LOGPROB_BYTES_PER_MESSAGE,
    chunk_message,
    event_messages,
    logprob_bytes,
    refusal_message,
    request_from_message,
    write_output,
)
from coatcheck.workers.service.outbox import Outbox
from coatcheck.workers.service.request_log import LoggedRequest, RequestLog

_LAST_WRITE_SECONDS: Final = 1.0

_log = logging.getLogger(__name__)
# One message for one session.
Outgoing = tuple["RouterSession", wire.FromGroup]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A submission that the group is answering. `number`: the submission's number in its stream, from 1. `choices`:
    indices of the unfinished choices."""

    session: RouterSession
    number: int
    submit_id: int
    attempt: int
    record: LoggedRequest
    choices: set[int]


class QueuedTokens:
    """The prompt tokens queued at the group, as known between two steps.

    The engine counts its queue after each step, and a step with a long prompt takes tenths of a second. Submissions
    that arrive meanwhile wait in the engine loop. They are added here, so that a submission can be returned to its
    router at once and not only after the step. Submissions of all routers are numbered together from 1. Used in the
    service's event loop only.
    """

    def __init__(self) -> None:
        self._after_step = 0
        self._unprocessed: deque[tuple[int, int]] = deque()  # (number, prompt tokens to compute)
        self._unprocessed_tokens = 0
        self._received = 0

    @property
    def total(self) -> int:
        """Prompt tokens of waiting and running requests that are not computed yet."""
        return self._after_step + self._unprocessed_tokens

    def add_submission(self, tokens: int) -> None:
        """Count the next submission. `tokens`: prompt tokens to compute; 0 if the submission was refused or
        returned."""
        self._received += 1
        if tokens:
            self._unprocessed.append((self._received, tokens))
            self._unprocessed_tokens += tokens

    def update(self, after_step: int, num_processed: int) -> None:
        """Take the engine's count after a step, which includes the first `num_processed` submissions."""
        self._after_step = after_step
        while self._unprocessed and self._unprocessed[0][0] <= num_processed:
            self._unprocessed_tokens -= self._unprocessed.popleft()[1]

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        numbers = [number for number, _ in self._unprocessed]
        assert numbers == sorted(set(numbers)) and max(numbers, default=0) <= self._received, "order of submissions"
        assert self._unprocessed_tokens == sum(tokens for _, tokens in self._unprocessed), "sum of tokens"


class SessionTable:
    """The sessions of a group and their open requests.

    `sessions`: registered sessions by number; only the engine's thread changes the dict.
    `requests`: by the engine's request id. The service's thread adds requests and both threads remove them:
    `close_request` pops a request atomically, so only the first caller gets the request and logs its outcome.
    `max_open`: limit on the open requests of all routers together.
    `num_processed`: submissions of all streams that the engine has processed; only the engine's thread uses the count.
    """

    def __init__(self, registration: wire.Registration, log: RequestLog, max_open: int) -> None:
        self.registration = registration
        self.max_open = max_open
        self.sessions: dict[int, RouterSession] = {}
        self.requests: dict[str, OpenRequest] = {}
        self.num_processed = 0
        self.queued_tokens = QueuedTokens()
        self.next_event = 0  # sequence number of the next KV event; only the engine's thread uses it
        self._log = log

    def open_request(
        self, engine_request_id: str, session: RouterSession, submit: wire.Submit, num_choices: int, number: int
    ) -> None:
        """Add a submission. Call this before the engine gets the request.

        `engine_request_id`: see RouterSession._engine_request_id. `number`: see OpenRequest. The log has the client's
        `submit.request_id`.
        """
        assert engine_request_id not in self.requests, f"{engine_request_id} is open"
        trace_context = {"traceparent": submit.traceparent, "tracestate": submit.tracestate}
        record = self._log.open_request(submit.request_id, len(submit.prompt_token_ids), trace_context)
        self.requests[engine_request_id] = OpenRequest(
            session, number, submit.id, submit.attempt, record, set(range(num_choices))
        )

    def close_request(self, engine_request_id: str, outcome: str) -> OpenRequest | None:
        """Remove a request and log its outcome: "ok", "aborted" or "refused: ...". None if it was closed before."""
        request = self.requests.pop(engine_request_id, None)
        if request is not None:
            self._log.close_request(request.record, outcome)
        return request

    def close_choice(self, engine_request_id: str, request: OpenRequest, choice: int) -> None:
        """Remove one choice of a request, and the request with its last choice."""
        request.choices.discard(choice)
        if not request.choices:
            self.close_request(engine_request_id, "ok")

    def build_messages(self, output: StepOutput) -> list[Outgoing]:
        """The messages of one engine step, in the order of sending: KV events to all sessions, tokens to each session
        with outputs, in one batch or, if they have many log-probabilities, in several; refusals. Closes the requests
        that end with this step. In the engine's thread."""
        messages: list[Outgoing] = []
        if output.events:
            if self.sessions:
                for message in event_messages(self.registration.epoch, self.next_event, output.events):
                    messages.extend((session, message) for session in self.sessions.values())
            self.next_event += len(output.events)
        batches: dict[int, wire.FromGroup] = {}
        sizes: dict[int, int] = {}  # bytes of log-probabilities in each session's present batch
        for sequence in output.outputs:
            request = self.requests.get(sequence.request_id)
            if request is None:
                continue  # the router has left or aborted the request, and the engine has not processed the abort yet
            session = request.session
            batch = batches.get(session.number)
            size = sizes.get(session.number, 0) + logprob_bytes(sequence)
            if batch is not None and size > LOGPROB_BYTES_PER_MESSAGE:
                batch, size = None, logprob_bytes(sequence)
            sizes[session.number] = size
            if batch is None:
                batch = batches[session.number] = wire.FromGroup(batch=wire.StepBatch(step=output.step))
                messages.append((session, batch))
            write_output(batch.batch.outputs.add(), sequence, request.submit_id, request.attempt)
            self._log.record_output(request.record, sequence)
            if sequence.finish_reason is not None:
                self.close_choice(sequence.request_id, request, sequence.choice)
        for engine_request_id, error in output.refused:
            if (request := self.close_request(engine_request_id, f"refused: {error}")) is not None:
                messages.append((request.session, refusal_message(request.submit_id, request.attempt, error)))
        return messages

    def check(self) -> None:
        """Raises AssertionError unless every open request has an unfinished choice."""
        for engine_request_id, request in list(self.requests.items()):
            assert request.choices, f"{engine_request_id} is open without a choice"
        self.queued_tokens.check()


class RouterSession:
    """One router's stream. Create the session in the service's event loop, then call `run`.

    `number`: unique in this incarnation of the group. `router`: the router's name, for logs.
    `num_processed`: this stream's submissions that the engine has processed; only the engine's thread uses the count.
    """

    def __init__(self, number: int, router: str, table: SessionTable, engine: EngineLoop, buffer_bytes: int) -> None:
        self.number = number
        self.router = router
        self.num_processed = 0
        self.outbox = Outbox(buffer_bytes)
        self._table = table
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._num_received = 0  # submissions of this stream
        self._snapshot_wanted = asyncio.Event()
        self._snapshot_wanted.set()  # a router that attaches gets one

    async def run(
        self, messages: AsyncIterator[wire.ToGroup], write: Callable[[wire.FromGroup], Awaitable[None]]
    ) -> None:
        """Read and write until the router ends the stream, the outbox overflows or the outbox ends. Then abort the
        router's requests."""
        reading = asyncio.create_task(self._read_messages(messages))
        sending = asyncio.create_task(self._send_snapshots())
        writing = asyncio.create_task(self.outbox.write_messages(write))
        overflow = asyncio.create_task(self.outbox.overflowed.wait())
        try:
            await asyncio.wait([reading, sending, writing, overflow], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # gRPC cannot end a stream after a cancelled write, and the router would wait for its timeout.
            self.outbox.close()
            sending.cancel()
            await asyncio.wait([writing], timeout=_LAST_WRITE_SECONDS)
            for task in (reading, writing, overflow):
                task.cancel()
            read, sent, *_ = await asyncio.gather(reading, sending, writing, overflow, return_exceptions=True)
            if isinstance(read, Exception):
                _log.error("the stream of router %r could not be read", self.router, exc_info=read)
            if isinstance(sent, Exception):
                _log.error("no snapshot could be sent to router %r", self.router, exc_info=sent)
            self._leave_group()

    def open_requests(self) -> list[str]:
        """Engine request ids of this router's open requests."""
        return [key for key, request in list(self._table.requests.items()) if request.session is self]

    async def _read_messages(self, messages: AsyncIterator[wire.ToGroup]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._submit_request(message.submit)
            elif kind == "abort":
                choice = message.abort.choice if message.abort.HasField("choice") else None
                self._abort_request(self._engine_request_id(message.abort.id), choice)
            elif kind == "reset_prefix_cache":
                self._engine.call_between_steps(lambda engine: engine.reset_prefix_cache())
            elif kind == "snapshot":
                self._snapshot_wanted.set()

    async def _send_snapshots(self) -> None:
        """Send a snapshot to the router when it attaches, and whenever it asks for one.

        The next chunk is read when the router has been sent everything before it, so that tokens wait for one chunk at
        most. A router that asks again during a snapshot has dropped what it had, and gets another one.
        """
        while True:
            await self._snapshot_wanted.wait()
            self._snapshot_wanted.clear()
            snapshot: CacheSnapshot | None = None
            while not self._snapshot_wanted.is_set() and not (snapshot and snapshot.is_complete):
                send_chunk = partial(self._send_chunk, snapshot)
                snapshot = await asyncio.wrap_future(self._engine.call_between_steps(send_chunk))
                await self.outbox.wait_until_written()

    def _send_chunk(self, snapshot: CacheSnapshot | None, engine: Engine) -> CacheSnapshot:
        """Send the next chunk of `snapshot`, or the first one of a new snapshot, and return that snapshot. In the
        engine's thread, between two steps: the chunk is queued after all events of earlier steps."""
        is_first = snapshot is None
        if snapshot is None:
            self._join_group()
            snapshot = engine.begin_snapshot()
        blocks, sequence = snapshot.read_chunk(CHUNK_BLOCKS), self._table.next_event
        self._loop.call_soon_threadsafe(self._put_chunk, sequence, blocks, is_first, snapshot.is_complete)
        return snapshot

    def _put_chunk(self, sequence: int, blocks: list[KvEvent], is_first: bool, is_last: bool) -> None:
        epoch = self._table.registration.epoch
        self.outbox.put_message(chunk_message(epoch, sequence, blocks, first=is_first, last=is_last))

    def _join_group(self) -> None:
        """Register this session, if that is not done: from now on it is sent the KV events of each step. In the
        engine's thread: a group whose engine hangs never registers, because routers would send it work again and
        again."""
        table = self._table
        if self.number not in table.sessions:
            table.sessions[self.number] = self
            message = wire.FromGroup(registration=table.registration)
            self._loop.call_soon_threadsafe(self.outbox.put_message, message)
            _log.info("router %r attached", self.router)

    def _submit_request(self, submit: wire.Submit) -> None:
        table, engine_request_id = self._table, self._engine_request_id(submit.id)
        self._num_received += 1
        count_processed = partial(self._count_processed, self._num_received)
        try:
            if engine_request_id in table.requests:
                raise InvalidRequest(f"id {submit.id} is in use")
            request = request_from_message(submit, engine_request_id)
            if (count := len(table.requests)) >= table.max_open:
                raise Overloaded(f"group {table.registration.group} has {count} open requests, which is its limit")
        except CoatcheckError as error:
            self._decline(refusal_message(submit.id, submit.attempt, error), count_processed)
            return
        if submit.HasField("max_queued_tokens") and (queued := table.queued_tokens.total) > submit.max_queued_tokens:
            returned = wire.Returned(id=submit.id, attempt=submit.attempt, queued_prefill_tokens=queued)
            self._decline(wire.FromGroup(returned=returned), count_processed)
            return
        has_count = submit.HasField("uncached_tokens")
        table.queued_tokens.add_submission(submit.uncached_tokens if has_count else len(submit.prompt_token_ids))
        table.open_request(engine_request_id, self, submit, request.sampling.n, self._num_received)
        self._engine.submit_request(request, partial(self._refuse_request, engine_request_id), count_processed)

    def _decline(self, message: wire.FromGroup, count_processed: Callable[[], None]) -> None:
        """Answer a submission that does not reach the engine. The engine's thread counts the submission as processed,
        in the order of submissions."""
        self.outbox.put_message(message)
        self._table.queued_tokens.add_submission(0)
        self._engine.call_between_steps(lambda _: count_processed())

    def _abort_request(self, engine_request_id: str, choice: int | None) -> None:
        request = self._table.requests.get(engine_request_id)
        if request is None:
            return  # the request has ended
        if choice is not None:
            self._table.close_choice(engine_request_id, request, choice)
        else:
            self._table.close_request(engine_request_id, "aborted")
        self._engine.abort_request(engine_request_id, choice)

    def _count_processed(self, number: int) -> None:
        """Record that later stats include this stream's first `number` submissions. In the engine's thread."""
        self._table.num_processed += number - self.num_processed
        self.num_processed = number

    def _refuse_request(self, engine_request_id: str, error: CoatcheckError) -> None:
        """Tell the router that the engine has refused a submission. In the engine's thread."""
        request = self._table.close_request(engine_request_id, f"refused: {error}")
        if request is not None:
            message = refusal_message(request.submit_id, request.attempt, error)
            self._loop.call_soon_threadsafe(self.outbox.put_message, message)

    def _leave_group(self) -> None:
        _log.info("router %r left", self.router)
        self._engine.call_between_steps(lambda _: self._table.sessions.pop(self.number, None))  # queued after any join
        for engine_request_id in self.open_requests():
            self._abort_request(engine_request_id, None)

    def _engine_request_id(self, submit_id: int) -> str:
        """The engine's request id. Submission ids are unique only within a session."""
        return f"{self.number}.{submit_id}"
