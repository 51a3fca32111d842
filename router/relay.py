"""Relay: one request's life, from its first group to its last token.

It places the request, turns outputs into events, and when a group is lost sends the request again to an equal one with
what has been delivered, so that the client sees one stream. It does not know how events are sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

from ..proto.coatcheck_pb2 import ChoiceEnd, Delta, Final, GenerateEvent, PromptLogprobs, Started, TokenLogprob, Usage
from ..proto.errors import Overloaded, Poisoned
from ..proto.worker_pb2 import SequenceOutput
from .choice import Choice
from .config import RouterConfig
from .detokenizer import Detokenizer
from .dispatch import Dispatch
from .fair_queue import Served
from .placement import Placement
from .policy import Decision
from .request import Request
from .suspicion import Suspicion
from .ticket import GroupLost


class Relay:
    """`async for event in relay.events()`, then `close()` whatever happened. The counts are for whoever measures."""

    def __init__(
        self, request: Request, dispatch: Dispatch, config: RouterConfig, detokenizer: Callable[[], Detokenizer]
    ) -> None:
        self.request = request
        self.usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._dispatch = dispatch
        self._config = config
        self._detokenizer = detokenizer
        self._choices: list[Choice] = []
        self._placement: Placement | None = None
        self._counted = False  # whether we know what the first group found in its cache
        # Prompt tokens whose log-probabilities were passed on, and that the present group has sent: it begins again.
        self._echoed = self._scored = 0
        self._decision: Decision | None = None
        self._served: Served | None = None
        self._moves = 0
        self._left: set[str] = set()  # groups that were lost: tried again only if there is no other
        self._suspicion = Suspicion()
        self._answered_here = False  # something, by the group that has it now
        dispatch.retries.opened()

    @property
    def decision(self) -> Decision | None:
        """The last one made, if any was."""
        return self._decision

    @property
    def completion_tokens(self) -> int:
        """Delivered so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

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
        for delta in self._prime(placement):
            yield GenerateEvent(delta=delta)
        while not self._finished:
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
            events = self._advance(outputs, placement)
            self._answered_here = self._answered_here or bool(events)
            if events and self._suspicion.is_any:
                self._suspicion.answered(sum(len(output.token_ids) for output in outputs))
                placement.suspect(self._suspicion.level)
            for event in events:
                yield event
        yield GenerateEvent(final=self._final(placement))

    def close(self) -> None:
        """Frees what a group holds of it; events end."""
        self.usage.completion_tokens = self.completion_tokens
        if self._served is not None:
            found = self.usage.cached_device_tokens + self.usage.cached_host_tokens
            self._dispatch.line.ended(self._served, max(self.usage.prompt_tokens - found, 0), self.completion_tokens)
            self._served = None
        if self._placement is not None:
            self._placement.close(finished=self._finished)
            self._placement = None
        self._dispatch.retries.closed()

    @property
    def _finished(self) -> bool:
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices)

    async def _enter(self, lost: Placement | None = None, wait_seconds: float = 0.0) -> Placement:
        """Into the line; one that is back with nothing answered may be refused there as if it came now."""
        self._placement, served = await self._dispatch.enter(
            self.request,
            self._moves,
            self._delivered,
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

    async def _return(self, placement: Placement) -> Placement:
        """The group has no room for it after all: back into the line."""
        placement.close(finished=True)
        self._placement = None
        self._scored = 0
        return await self._enter(placement)

    async def _place(self, wait_seconds: float, lost: Placement | None = None) -> Placement:
        self._placement = await self._dispatch.place(
            self.request,
            self._moves,
            self._delivered,
            wait_seconds=wait_seconds,
            like=lost.model if lost else None,
            avoid=self._left,
            suspicion=self._suspicion.level,
        )
        return self._placed(self._placement)

    @property
    def _delivered(self) -> Mapping[int, Sequence[int]]:
        return {choice.index: choice.token_ids for choice in self._choices} or self.request.resume

    def _placed(self, placement: Placement) -> Placement:
        self._decision = placement.decision
        self._answered_here = False
        for choice in self._choices:
            if choice.finish_reason:  # a group cannot know where a stop string ended a choice
                placement.ticket.abort(choice.index)
        return placement

    def _prime(self, placement: Placement) -> list[Delta]:
        """Makes the choices and takes up what the client already has; returns the ends that it implies."""
        sampling, eos = self.request.sampling, frozenset(placement.model.eos_token_ids)
        ended = []
        for index in range(sampling.n):
            choice = Choice(index, self._detokenizer(), sampling.stop, eos, sampling.include_stop)
            self._choices.append(choice)
            delta = choice.prime(self.request.resume.get(index, ()))
            if delta is not None:
                ended.append(delta)
                placement.ticket.abort(index)
        return ended

    async def _move(self, placement: Placement, lost: GroupLost) -> Placement:
        """To another group, unless those before speak against it (see Suspicion)."""
        placement.close(finished=True)
        self._placement = None
        self._left.add(placement.ticket.group)
        if self.request.passage is not None:
            self.request.passage.lost(placement.ticket.group, str(lost))
        self._scored = 0
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

    def _advance(self, outputs: Sequence[SequenceOutput], placement: Placement) -> list[GenerateEvent]:
        """All that came at once, as one delta per choice."""
        events: list[GenerateEvent] = []
        deltas: dict[int, Delta] = {}
        for output in outputs:
            if output.HasField("cached"):
                placement.computed(output.cached)
            if output.HasField("cached") and not self._counted:
                self._counted = True
                if self.request.passage is not None:
                    self.request.passage.computing(output.cached)
                self.usage.cached_device_tokens = output.cached.device_tokens
                self.usage.cached_host_tokens = output.cached.host_tokens
            if output.prompt_logprobs and (scored := self._score(output.prompt_logprobs)):
                events.append(GenerateEvent(prompt_logprobs=PromptLogprobs(tokens=scored)))
            index = output.choice
            choice = self._choices[index]
            if choice.finish_reason or not (output.token_ids or output.finish_reason):
                continue  # it is over, or its prompt is still being computed
            delta = deltas.get(index)
            if delta is None:
                event = GenerateEvent()
                events.append(event)
                delta = deltas[index] = event.delta
                delta.choice = index
            choice.advance(output, delta)
            if choice.finish_reason and not output.finish_reason:
                placement.ticket.abort(index)
        return events

    def _score(self, part: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """What the client does not have yet of the next prompt tokens' log-probabilities."""
        known = self._echoed - self._scored
        self._scored += len(part)
        self._echoed = max(self._echoed, self._scored)
        return part[known:]

    def _final(self, placement: Placement) -> Final:
        self.usage.completion_tokens = self.completion_tokens
        return Final(
            usage=self.usage,
            group=placement.ticket.group,
            routed_by=placement.decision.why,
            moves=self._moves,
            choices=[
                ChoiceEnd(
                    choice=choice.index,
                    finish_reason=choice.finish_reason,
                    completion_tokens=len(choice.token_ids),
                )
                for choice in self._choices
            ],
        )
