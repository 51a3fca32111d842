"""Relay: one request's way, from its first group to its last token.

It places the request, hands its answer on, and when a group is lost sends the request again to an equal one with what
has been delivered, so that the client sees one stream. It does not know how events are sent, nor text.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final as Constant

from coatcheck.proto.errors import Overloaded, Poisoned
from coatcheck.proto.stubs.coatcheck_pb2 import Final, GenerateEvent, Started, Usage
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import GroupLost
from coatcheck.router.routing.routing_cost import Decision
from coatcheck.router.serving.assignment import Assignment
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.serving.fair_queue import Served
from coatcheck.router.serving.poison_detection import PoisonSuspicion
from coatcheck.router.serving.response_builder import ResponseBuilder
from coatcheck.router.text.detokenizer import Detokenizer

# Log-probabilities that become events, and chunks of a stream, in 30 ms.
_MOST_VALUES: Constant = 4096


class Relay:
    """`async for event in relay.events()`, then `close()` whatever happened. The counts are for whoever measures."""

    def __init__(
        self, request: Request, dispatch: Dispatcher, config: RouterConfig, detokenizer: Callable[[], Detokenizer]
    ) -> None:
        self.request = request
        self._dispatch = dispatch
        self._config = config
        self._detokenizer = detokenizer
        self._answer = ResponseBuilder(request)
        self._placement: Assignment | None = None
        self._decision: Decision | None = None
        self._served: Served | None = None
        self._moves = 0
        self._left: set[str] = set()  # groups that were lost: tried again only if there is no other
        self._suspicion = PoisonSuspicion()
        self._answered_here = False  # something, by the group that has it now
        dispatch.retries.opened()

    @property
    def decision(self) -> Decision | None:
        """The last one made, if any was."""
        return self._decision

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        return self._answer.usage

    @property
    def completion_tokens(self) -> int:
        """Delivered so far, over all choices."""
        return self._answer.completion_tokens

    async def events(self) -> AsyncIterator[GenerateEvent]:
        """Started, then deltas, then one Final; raises CoatcheckError where the request cannot go on."""
        request = self.request
        refused: float | None = None  # since when groups have said that they are full, and nothing else
        if request.resume:  # accepted by another router, or by this one before it was started again
            placement = await self._place(self._config.move_wait_seconds)
        else:
            placement = await self._enter(wait_seconds=self._config.admission_wait_seconds)
        yield GenerateEvent(
            started=Started(
                request_id=request.request_id,
                model=self._config.model_name,
                seed=request.sampling.seed,
                group=placement.ticket.group,
                prompt_tokens=len(request.prompt_token_ids),
            )
        )
        for delta in self._answer.begin(frozenset(placement.model.eos_token_ids), self._detokenizer):
            placement.ticket.abort(delta.choice)
            yield GenerateEvent(delta=delta)
        while not self._answer.is_whole:
            try:
                outputs = await placement.ticket.take()
            except GroupLost as lost:
                placement = await self._move(placement, lost)
                continue
            except Overloaded:
                now = asyncio.get_running_loop().time()
                refused = now if refused is None else refused
                if now - refused > self._config.move_wait_seconds:
                    raise
                placement = await self._return(placement)
                continue
            refused = None
            for number, portion in enumerate(_portions(outputs)):
                if number:
                    await asyncio.sleep(0)
                for event in self._advance(portion, placement):
                    yield event
        yield GenerateEvent(final=self._final(placement))

    def close(self) -> None:
        """Frees what a group holds of it; events end."""
        if self._served is not None:
            usage = self.usage
            found = usage.cached_device_tokens + usage.cached_host_tokens
            self._dispatch.line.ended(self._served, max(usage.prompt_tokens - found, 0), usage.completion_tokens)
            self._served = None
        if self._placement is not None:
            self._placement.close(finished=self._answer.is_whole)
            self._placement = None
        self._dispatch.retries.closed()

    async def _enter(self, lost: Assignment | None = None, wait_seconds: float = 0.0) -> Assignment:
        """Into the line; one that is back with nothing answered may be refused there as if it came now."""
        self._placement, served = await self._dispatch.enter(
            self.request,
            self._moves,
            self._answer.delivered,
            wait_seconds=wait_seconds,
            like=lost.model if lost else None,
            bounded=not self.completion_tokens and not self.request.resume and not self._moves,
        )
        if self._served is None:
            self._served = served
        else:
            served.settle(0)  # it has been charged already
        self._placement.suspect(self._suspicion.level)  # the line sends suspects anywhere; they stay what they are
        return self._placed(self._placement)

    async def _return(self, placement: Assignment) -> Assignment:
        """The group has no room for it after all: back into the line."""
        placement.close(finished=True)
        self._placement = None
        return await self._enter(placement)

    async def _place(self, wait_seconds: float, lost: Assignment | None = None) -> Assignment:
        self._placement = await self._dispatch.place(
            self.request,
            self._moves,
            self._answer.delivered,
            wait_seconds=wait_seconds,
            like=lost.model if lost else None,
            avoid=self._left,
            suspicion=self._suspicion.level,
        )
        return self._placed(self._placement)

    def _placed(self, placement: Assignment) -> Assignment:
        self._decision = placement.decision
        self._answered_here = False
        self._answer.begin_again()
        for choice in self._answer.ended:  # a group cannot know where a stop string ended a choice
            placement.ticket.abort(choice)
        return placement

    async def _move(self, placement: Assignment, lost: GroupLost) -> Assignment:
        """To another group, unless those before speak against it (see Suspicion)."""
        placement.close(finished=True)
        self._placement = None
        self._left.add(placement.ticket.group)
        if self.request.passage is not None:
            self.request.passage.lost(placement.ticket.group, str(lost))
        self._suspicion.lost(lost.loss, apart=lost.apart, answered=self._answered_here)
        await self._learn()
        if refusal := self._suspicion.refusal:
            raise Poisoned(f"{refusal}; it is not sent to another") from lost
        if delay := self._dispatch.retries.take():
            await asyncio.sleep(delay)
        self._moves += 1
        return await self._place(self._config.move_wait_seconds, placement)

    async def _learn(self) -> None:
        """Waits a moment for what is not known yet of how groups were lost, where that decides."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.cause_wait_seconds):
                while undecided := self._suspicion.undecided:
                    await undecided[0].known()

    def _advance(self, outputs: Sequence[SequenceOutput], placement: Assignment) -> list[GenerateEvent]:
        for output in outputs:
            if output.HasField("cached"):
                placement.computed(output.cached)
                if self._answer.found(output.cached) and self.request.passage is not None:
                    self.request.passage.computing(output.cached)
        events = self._answer.advance(outputs, placement.ticket.abort)
        if events:
            self._answered_here = True
            if self._suspicion.is_any:
                self._suspicion.answered(sum(len(output.token_ids) for output in outputs))
                placement.suspect(self._suspicion.level)
        return events

    def _final(self, placement: Assignment) -> Final:
        return Final(
            usage=self.usage,
            group=placement.ticket.group,
            routed_by=placement.decision.why,
            moves=self._moves,
            choices=self._answer.ends(),
        )


def _portions(outputs: Sequence[SequenceOutput]) -> Iterator[Sequence[SequenceOutput]]:
    """The outputs, divided where more than _MOST_VALUES log-probabilities would become events in one turn of the event
    loop: those of a client that has not read for a while are thousands of steps."""
    begin = values = 0
    for place, output in enumerate(outputs):
        for logprobs in (output.logprobs, output.prompt_logprobs):
            if logprobs:
                values += len(logprobs) * (1 + len(logprobs[0].top))
        if values > _MOST_VALUES and place > begin:
            yield outputs[begin:place]
            begin, values = place, 0
    yield outputs[begin:]
