"""Relay: one request from its first group to its last token.

The relay sends the request, and turns its group's outputs into events for the client. When the group is lost, the
relay sends the request again, with the tokens that were delivered, to a group of the same kind (see group_kind). If the
client has no output yet, any group may run the request. The client sees one stream without a break.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from coatcheck.proto.errors import Overloaded, Poisoned
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_failures import GroupLost
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission, SubmissionReturned
from coatcheck.router.routing.routing_cost import Decision
from coatcheck.router.serving.admission_queue import Attempt
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.serving.fair_queue import TokenCharge
from coatcheck.router.serving.logprob_limits import count_values
from coatcheck.router.serving.poison_suspicion import PoisonSuspicion
from coatcheck.router.serving.response_builder import ResponseBuilder
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.text.detokenizer import Detokenizer

# Max log-probabilities that one turn of the event loop turns into events, and into HTTP chunks: 30 ms of work.
MAX_LOGPROBS_PER_TURN: Final = 4096


class Relay:
    """Use `async for event in relay.events()`, then `close()`, also after an error.

    `is_admitted`: whether a router has admitted the request before, so that it does not wait in the queue.
    `resumed_kind`: the kind of group that has computed the tokens of a resume; b"" if it has none, or if that is not
    known. `make_ticket` returns the ticket of this request for groups of a kind. `decision`: the last routing decision,
    None before the first. `usage`: tokens so far.
    """

    def __init__(
        self,
        request: Request,
        lifecycle: RequestLifecycle,
        dispatcher: Dispatcher,
        config: RouterConfig,
        make_detokenizer: Callable[[], Detokenizer],
        *,
        is_admitted: bool,
        resumed_kind: bytes,
        make_ticket: Callable[[bytes], bytes],
    ) -> None:
        self.decision: Decision | None = None
        self._request = request
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._config = config
        self._make_detokenizer = make_detokenizer
        self._is_admitted = is_admitted
        self._resumed_kind = resumed_kind
        self._make_ticket = make_ticket
        self._response = ResponseBuilder(request)
        self._submission: Submission | None = None
        self._charge: TokenCharge | None = None
        self._moves = 0
        self._returns = 0  # how often groups have returned the request
        self._lost_groups: set[str] = set()  # tried again only if there is no other
        self._suspicion = PoisonSuspicion()
        self._has_answered = False  # whether the present group has sent output that the client gets
        self._ticket_kind = b""  # the kind in the ticket that the client has
        dispatcher.retries.open_request()

    @property
    def usage(self) -> pb.Usage:
        return self._response.usage

    async def events(self) -> AsyncIterator[pb.GenerateEvent]:
        """Yields Started, then prompt log-probabilities and deltas, then Final. Raises CoatcheckError if the request
        cannot continue."""
        request, response = self._request, self._response
        full_since: float | None = None  # time of the first of the Overloaded refusals since the last outputs
        if self._is_admitted:
            submission = await self._send(self._config.move_wait_seconds, self._resumed_kind)
        else:
            submission = await self._admit(self._resumed_kind, wait_seconds=self._config.admission_wait_seconds)
        self._ticket_kind = submission.group_kind
        yield pb.GenerateEvent(
            started=pb.Started(
                request_id=request.request_id,
                model=request.adapter or self._config.model_name,
                seed=request.sampling.seed,
                group=submission.group,
                prompt_tokens=len(request.prompt_token_ids),
                resume_ticket=self._make_ticket(submission.group_kind),
            )
        )
        for delta in response.start_choices(frozenset(submission.model.eos_token_ids), self._make_detokenizer):
            submission.abort_choice(delta.choice)
            yield pb.GenerateEvent(delta=delta)
        while not response.is_complete:
            try:
                outputs = await anext(submission)
            except GroupLost as lost:
                submission = await self._fail_over(submission, lost)
                continue
            except SubmissionReturned:
                self._returns += 1
                submission.close(finished=False)
                submission = await self._admit(self._resumed_kind)
                continue
            except Overloaded:
                now = asyncio.get_running_loop().time()
                full_since = now if full_since is None else full_since
                if now - full_since > self._config.move_wait_seconds:
                    raise
                submission.close(finished=False)
                submission = await self._admit(self._kind_to_continue(submission))
                continue
            full_since = None
            for number, portion in enumerate(logprob_portions(outputs)):
                if number:
                    await asyncio.sleep(0)
                for event in self._make_events(portion, submission):
                    yield event
        yield pb.GenerateEvent(final=self._final(submission))

    def close(self) -> None:
        """Closes the submission and settles the tenant's charge. `events` must have ended."""
        if self._charge is not None:
            usage = self.usage
            cached = usage.cached_device_tokens + usage.cached_host_tokens
            computed = max(usage.prompt_tokens - cached, 0)
            self._dispatcher.queue.settle_charge(self._charge, computed, usage.completion_tokens)
            self._charge = None
        if self._submission is not None:
            self._submission.close(finished=self._response.is_complete)
            self._submission = None
        self._dispatcher.retries.close_request()

    async def _admit(self, group_kind: bytes, wait_seconds: float = 0.0) -> Submission:
        """Sends the request in the order of the admission queue. A full queue refuses only a request that was not
        admitted before: it has no output yet, has not moved and was not returned by a group."""
        self._submission = None
        grant = await self._dispatcher.admit(
            self._attempt(group_kind),
            wait_seconds=wait_seconds,
            bounded=not (self._is_admitted or self._response.completion_tokens or self._moves or self._returns),
        )
        if self._charge is None:
            self._charge = grant.charge
        else:
            grant.charge.settle_tokens(0)  # the tenant was charged when the request was first granted
        return self._begin_submission(grant.submission)

    async def _send(self, wait_seconds: float, group_kind: bytes) -> Submission:
        submission = await self._dispatcher.send(
            self._attempt(group_kind), wait_seconds=wait_seconds, exclude_groups=self._lost_groups
        )
        return self._begin_submission(submission)

    def _kind_to_continue(self, previous: Submission) -> bytes:
        """The kind that the next group must have. It is that of `previous` once the client has output, because a group
        of another kind would continue with other tokens. b"" before that: any group may run the request."""
        return previous.group_kind if self._response.has_output else self._resumed_kind

    def _attempt(self, group_kind: bytes) -> Attempt:
        return Attempt(
            self._request,
            self._lifecycle,
            self._moves,
            self._response.delivered,
            group_kind,
            self._suspicion.level,
            self._returns,
        )

    def _begin_submission(self, submission: Submission) -> Submission:
        self._submission = submission
        self.decision = submission.decision
        self._has_answered = False
        self._response.start_next_group(frozenset(submission.model.eos_token_ids))
        for choice in self._response.ended_choices:  # the group does not see stop strings, and would continue them
            submission.abort_choice(choice)
        return submission

    async def _fail_over(self, submission: Submission, lost: GroupLost) -> Submission:
        """Sends the request to another group. Raises Poisoned if the request seems to crash groups."""
        submission.close(finished=False)
        self._submission = None
        self._lost_groups.add(submission.group)
        self._lifecycle.record_group_lost(submission.group, str(lost))
        self._suspicion.record_loss(lost, answered=self._has_answered)
        await self._suspicion.wait_for_causes(self._config.cause_wait_seconds)
        if refusal := self._suspicion.refusal:
            raise Poisoned(f"{refusal}; it is not sent to another group") from lost
        if delay := self._dispatcher.retries.spend_retry():
            await asyncio.sleep(delay)
        self._moves += 1
        return await self._send(self._config.move_wait_seconds, self._kind_to_continue(submission))

    def _make_events(self, outputs: Sequence[SequenceOutput], submission: Submission) -> list[pb.GenerateEvent]:
        for output in outputs:
            if output.HasField("first_output"):
                submission.record_first_output(output.first_output)
                self._lifecycle.record_first_output(output.first_output)
                self._response.record_first_output(output.first_output)
        events = self._response.add_outputs(outputs, submission.abort_choice)
        if submission.group_kind != self._ticket_kind:
            self._replace_ticket(events, submission.group_kind)
        if events:
            self._has_answered = True
            if self._suspicion:
                self._suspicion.record_answer(sum(len(output.token_ids) for output in outputs))
                submission.set_suspicion(self._suspicion.level)
        return events

    def _replace_ticket(self, events: Sequence[pb.GenerateEvent], group_kind: bytes) -> None:
        """Gives the client the ticket for groups of this kind, with the first of its deltas."""
        delta = next((event.delta for event in events if event.HasField("delta")), None)
        if delta is not None:
            delta.resume_ticket = self._make_ticket(group_kind)
            self._ticket_kind = group_kind

    def _final(self, submission: Submission) -> pb.Final:
        return pb.Final(
            usage=self.usage,
            group=submission.group,
            routed_by=submission.decision.why,
            moves=self._moves,
            choices=self._response.choice_ends(),
            embedding=self._response.embedding,
            timings=self._lifecycle.timings(),
        )


def logprob_portions(outputs: Sequence[SequenceOutput]) -> Iterator[Sequence[SequenceOutput]]:
    """The outputs in portions of at most MAX_LOGPROBS_PER_TURN log-probabilities, or of one output that has more.

    A client that has not read for a while gets the outputs of thousands of steps at once.
    """
    begin = total = 0
    for end, output in enumerate(outputs):
        count = count_values(output.logprobs) + count_values(output.prompt_logprobs)
        if total + count > MAX_LOGPROBS_PER_TURN and end > begin:
            yield outputs[begin:end]
            begin, total = end, 0
        total += count
    yield outputs[begin:]
