"""GroupConnection: the one long-lived stream between this router and a group.

It sends submissions and aborts, hands outputs to their tickets and events to the prefix index, and keeps the group's
last word on its load. When the stream breaks, or the group falls silent, every ticket fails at once and the
link attaches anew, with backoff, until it is closed. A group that is not the one it should be, or sends what cannot be,
is ejected: its stream ends, with the reason. It does not know costs, text, or what becomes of a lost request.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import grpc

from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.errors import Overloaded, error_of
from coatcheck.proto.stubs.worker_pb2 import (
    Abort,
    FromGroup,
    Hello,
    LastWord,
    Refused,
    Registration,
    SnapshotRequest,
    ToGroup,
)
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import FailureCause, GroupFailures
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.group_stream import GroupSilent, GroupStream
from coatcheck.router.groups.output_delivery import OutputDelivery
from coatcheck.router.groups.registration_check import unfit
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Ejected, Ticket
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex

_log = logging.getLogger(__name__)
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 2.0


class GroupConnection:
    """`registration` is None while the group is not attached; `changed` is called whenever that changes, `eased`
    whenever it may have room again. `judge` is asked after each report of its load whether it may stay."""

    def __init__(
        self,
        address: GroupEndpoint,
        config: RouterConfig,
        index: PrefixIndex,
        changed: Callable[[], None],
        eased: Callable[[], None],
        judge: Callable[["GroupConnection"], Ejected | None],
        losses: GroupFailures,
    ) -> None:
        self.address = address
        self.registration: Registration | None = None
        self.load = GroupLoad(Registration())
        self.reason = address.reason
        self.ejections = 0
        self.ejected = ""  # why it last was
        self._router = config.name
        self._model_name = config.model_name
        self._plane = config.plane
        self._index = index
        self._changed = changed
        self._eased = eased
        self._judge = judge
        self._losses = losses
        self._last_word: LastWord | None = None
        self._paused = False  # since it is slow
        self._recalled = asyncio.Event()
        self._silence = config.silence_seconds
        self.tickets = OutputDelivery()
        self._stream = self._new_stream()
        self._last_id = 0
        self._task = asyncio.create_task(self._run(), name=f"link to {address.name}")

    @property
    def name(self) -> str:
        """The group's name."""
        return self.address.name

    def submit(
        self, request: Request, attempt: int, delivered: Mapping[int, Sequence[int]], uncached_tokens: int
    ) -> Ticket:
        """Sends a request, of whose prompt so much is to be computed; the ticket gets its outputs. Only while the group
        is attached."""
        assert self.registration is not None, f"group {self.name} is not attached"
        self._last_id += 1
        ticket = Ticket(self.name, self._last_id, attempt, request.sampling.n, self._abort)
        self.tickets.open(ticket)
        now = asyncio.get_running_loop().time()
        ticket.submission = self.load.add_submission(uncached_tokens, request.sampling.n)
        self._stream.send(ToGroup(submit=request.submit(ticket.id, attempt, delivered, uncached_tokens, now)))
        return ticket

    def close_ticket(self, ticket: Ticket, finished: bool) -> None:
        """Nobody takes from it any more; unless the group has finished it, the group is told."""
        ticket.close(finished)
        self.tickets.forget(ticket.id)
        self.suspect(ticket, 0)
        if ticket.submission is not None:
            ticket.submission.end()
        self._eased()

    def computed(self, ticket: Ticket) -> None:
        """Its prompt is not ahead of others any more."""
        if ticket.submission is not None:
            ticket.submission.begin()
        self._eased()

    def suspect(self, ticket: Ticket, level: int) -> None:
        """How suspect its request is from now on; whoever may not run beside it may come when it is so no more."""
        if ticket.suspicion != level:
            ticket.suspicion = level
            self._changed()

    async def close(self, reason: str) -> None:
        """The group is no longer ours; its requests fail over."""
        self.reason = reason
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def recall(self) -> None:
        """A slow group is wanted after all, since no other serves."""
        self._recalled.set()

    def _abort(self, id: int, choice: int | None) -> None:
        self._stream.send(ToGroup(abort=Abort(id=id, choice=choice)))

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while True:
            try:
                attached = await self._attach()
                backoff = _FIRST_BACKOFF if attached else min(backoff * 2, _LONGEST_BACKOFF)
            except Ejected as error:
                _log.error("group %s is ejected: %s", self.name, error)
                backoff = _LONGEST_BACKOFF  # it will hardly be another at once
                await self._pause(error.pause)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._recalled.wait()

    async def _attach(self) -> bool:
        """One stream from its beginning to its end; returns whether the group had registered. Raises Ejected."""
        self._stream = self._new_stream()
        self._last_word = None
        try:
            self._stream.send(ToGroup(hello=Hello(router=self._router, contract=CONTRACT, version=VERSION)))
            await self._stream.read(self._receive)
            self.reason = "the group ended the stream"
        except grpc.aio.AioRpcError as error:
            self.reason = f"{error.code().name}: {error.details()}"
        except GroupSilent:
            self._eject(f"the group has said nothing for {self._silence:g} s")
        except Ejected as error:
            self._eject(str(error))
            self._paused = bool(error.pause)
            raise
        except Exception as error:  # whatever a group sends, this router goes on serving the others
            _log.exception("group %s: its stream could not be read", self.name)
            self._eject(f"its stream could not be read: {error}")
            raise Ejected(self.reason) from error  # the next one will hardly be better at once
        finally:
            attached = self._lose()
        return attached

    def _new_stream(self) -> GroupStream:
        return GroupStream(self.address, self._plane, self._silence)

    def _receive(self, message: FromGroup) -> None:
        match message.WhichOneof("message"):
            case "batch":
                self.tickets.deliver(message.batch.outputs)
            case "events":
                self._apply(self._index.apply(self.name, message.events))
            case "load":
                self.load.report(message.load, asyncio.get_running_loop().time())
                if (slow := self._judge(self)) is not None:
                    raise slow
                self._eased()
            case "snapshot":
                self._apply(self._index.apply_snapshot(self.name, message.snapshot))
            case "refused":
                self._refuse(message.refused)
            case "last_word":
                self._last_word = message.last_word
            case "registration":
                self._register(message.registration)

    def _refuse(self, refused: Refused) -> None:
        ticket = self.tickets.get(refused.id)
        if ticket is not None and ticket.attempt == refused.attempt:
            self.tickets.forget(refused.id)
            error = error_of(refused.code, refused.message)
            if isinstance(error, Overloaded):
                self.load.refused()
            ticket.fail(error)

    def _register(self, registration: Registration) -> None:
        size = registration.model.block_size
        other = self._index.other_block_size(self.name, size)
        if reason := unfit(registration, self.address, self._model_name, other):
            raise Ejected(reason)
        self.registration = registration
        self.reason = ""
        self._paused = False
        self._recalled.clear()
        self.load = GroupLoad(registration)
        self._index.add_group(self.name, registration.epoch, registration.num_blocks + registration.host_blocks, size)
        self._changed()

    def ask_snapshot(self, why: str) -> None:
        """What is known of the group's blocks is to be replaced."""
        _log.warning("group %s: %s; asking for a snapshot", self.name, why)
        self._stream.send(ToGroup(snapshot=SnapshotRequest()))

    def _apply(self, outcome: EventOutcome) -> None:
        if outcome is EventOutcome.SNAPSHOT_NEEDED:
            self.ask_snapshot("a gap in its events")
        elif outcome is EventOutcome.IMPOSSIBLE:
            raise Ejected("the group says that it holds more blocks than it has")

    def _eject(self, reason: str) -> None:
        self.ejections += 1
        self.reason = self.ejected = reason

    def _lose(self) -> bool:
        """The stream is gone: fails every ticket, forgets every block. Returns whether the group had registered."""
        attached = self.registration is not None
        if self._last_word is not None:
            self.reason = f"it ended by itself: {self._last_word.reason}"
        self.registration = None
        self.load = GroupLoad(Registration())
        self._index.remove_group(self.name)
        if attached:
            reason = f"group {self.name} is lost: {self.reason}"
            loss = self._losses.lost(self.name, self.address.incarnation, reason, self._cause())
            self.tickets.fail_all(loss, self._last_word.waiting if self._last_word else ())
            self._changed()
        return attached

    def _cause(self) -> FailureCause:
        if self._last_word is not None:
            return FailureCause.CRASH
        if self._paused or self.address.state == "draining":  # whoever drains a group is about to end it
            return FailureCause.WANTED
        return FailureCause.UNKNOWN
