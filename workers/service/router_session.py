"""RouterSession: one router's stream, from its Hello to its end: what it asks is handed to the engine, or refused.

It lives in the service's event loop; what runs in the engine's thread says so. It does not know what a token means, nor
how messages are written.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.service.open_requests import OpenRequests
from coatcheck.workers.service.outbox import Outbox
from coatcheck.workers.service.step_mail import StepMail
from coatcheck.workers.service.wire import refused_message, request_of, snapshot_messages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """What all attachments of a group share. `subscribers` and `mail` belong to the engine's thread; `max_open`: so
    many requests of all routers together, and more are refused."""

    registration: wire.Registration
    engine: EngineLoop
    tickets: OpenRequests
    subscribers: dict[int, Outbox]
    mail: StepMail
    loop: asyncio.AbstractEventLoop
    max_open: int


class RouterSession:
    """`read` until the router ends, then `close`."""

    def __init__(self, desk: Desk, subscriber: Outbox) -> None:
        self._desk = desk
        self._subscriber = subscriber
        self._received = 0  # submissions of this stream

    async def read(self, requests: AsyncIterator[wire.ToGroup]) -> None:
        """Registers, sends a snapshot, and does what each message says."""
        await self._send_snapshot(registration=wire.FromGroup(registration=self._desk.registration))
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                self._submit(message.submit)
            elif kind == "abort":
                choice = message.abort.choice if message.abort.HasField("choice") else None
                self._abort(self._key(message.abort.id), choice)
            elif kind == "snapshot":
                await self._send_snapshot()

    def close(self) -> None:
        """Its requests are aborted."""
        _log.info("router %r left", self._subscriber.router)
        subscribers, number = self._desk.subscribers, self._subscriber.number
        self._desk.engine.call(lambda _: subscribers.pop(number, None))  # after a `join` still queued
        for key in self._desk.tickets.of(self._subscriber):
            self._abort(key, None)

    async def _send_snapshot(self, registration: wire.FromGroup | None = None) -> None:
        desk, subscriber = self._desk, self._subscriber
        if subscriber.takes_snapshot:
            return  # the events behind the one under way have no gap
        subscriber.hold_events()

        def join(engine: Engine) -> tuple[int, list[KvEvent]]:
            # Between two steps, so that no event falls between the snapshot and the first one published, and so that a
            # group registers only while its engine lives: one that hangs would get work again and again.
            if registration is not None:
                desk.loop.call_soon_threadsafe(subscriber.put, registration)
                _log.info("router %r attached", subscriber.router)
            desk.subscribers[subscriber.number] = subscriber
            return desk.mail.sequence, engine.snapshot()

        sequence, held = await asyncio.wrap_future(desk.engine.call(join))
        subscriber.put_snapshot(sequence, snapshot_messages(desk.registration.epoch, sequence, held))

    def _submit(self, submit: wire.Submit) -> None:
        desk, key = self._desk, self._key(submit.id)
        self._received += 1
        count_submission = partial(self._count_submission, self._received)
        try:
            if desk.tickets.get(key) is not None:
                raise InvalidRequest(f"id {submit.id} is in use")
            request = request_of(submit, key)
            if (count := len(desk.tickets)) >= desk.max_open:
                raise Overloaded(f"group {desk.registration.group} has {count} requests, as many as it holds")
        except CoatcheckError as error:
            self._subscriber.put(refused_message(submit.id, submit.attempt, error))
            desk.engine.call(lambda _: count_submission())  # after the submissions that are still queued for the engine
            return
        desk.tickets.open(key, self._subscriber, submit, request.sampling.n)
        desk.engine.submit(request, partial(self._refuse, key, submit), count_submission)

    def _abort(self, key: str, choice: int | None) -> None:
        ticket = self._desk.tickets.get(key)
        if ticket is None:
            return  # it has ended meanwhile
        if choice is not None:
            self._desk.tickets.close_choice(key, ticket, choice)
        else:
            self._desk.tickets.end(key, "aborted")
        self._desk.engine.abort(key, choice)

    def _count_submission(self, number: int) -> None:
        # In the engine's thread. The stats of every step from now on include the submissions up to `number`.
        self._subscriber.submissions = number

    def _refuse(self, key: str, submit: wire.Submit, error: CoatcheckError) -> None:
        # In the engine's thread.
        self._desk.tickets.end(key, f"refused: {error}")
        message = refused_message(submit.id, submit.attempt, error)
        self._desk.loop.call_soon_threadsafe(self._subscriber.put, message)

    def _key(self, submit_id: int) -> str:
        """The engine's request id: routers number their submissions independently of each other."""
        return f"{self._subscriber.number}.{submit_id}"
