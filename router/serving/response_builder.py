"""ResponseBuilder: what the client has of the answer to one request, over however many groups that takes.

It turns a group's outputs into events, and knows what the next group is not to send again. It does not know which
groups, nor why they change.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from coatcheck.proto.stubs.coatcheck_pb2 import ChoiceEnd, Delta, GenerateEvent, PromptLogprobs, Usage
from coatcheck.proto.stubs.worker_pb2 import Cached, SequenceOutput
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.choice import Choice
from coatcheck.router.text.detokenizer import Detokenizer


class ResponseBuilder:
    """`begin` with the first group, `begin_again` with each further one; `advance` with whatever comes."""

    def __init__(self, request: Request) -> None:
        self._usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._request = request
        self._choices: list[Choice] = []
        self._counted = False  # whether we know what the first group found in its cache
        # Prompt tokens whose log-probabilities were passed on, and that the present group has sent: it begins again.
        self._echoed = self._scored = 0

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        self._usage.completion_tokens = self.completion_tokens
        return self._usage

    @property
    def completion_tokens(self) -> int:
        """Delivered so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def delivered(self) -> Mapping[int, Sequence[int]]:
        """By choice, what the client has, be it from us or from a router before."""
        return {choice.index: choice.token_ids for choice in self._choices} or self._request.resume

    @property
    def ended(self) -> list[int]:
        """Choices that are over."""
        return [choice.index for choice in self._choices if choice.finish_reason]

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing more to come but the end."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices)

    def begin(self, eos: AbstractSet[int], detokenizer: Callable[[], Detokenizer]) -> list[Delta]:
        """Makes the choices and takes up what the client already has; returns the ends that it implies."""
        sampling = self._request.sampling
        deltas = []
        for index in range(sampling.n):
            choice = Choice(index, detokenizer(), sampling.stop, eos, sampling.include_stop)
            self._choices.append(choice)
            delta = choice.prime(self._request.resume.get(index, ()))
            if delta is not None:
                deltas.append(delta)
        return deltas

    def begin_again(self) -> None:
        """Another group has it from now on."""
        self._scored = 0

    def record_cached(self, cached: Cached) -> None:
        """A group has computed the prompt, and found `cached` tokens of it; the first group's report counts."""
        if not self._counted:
            self._counted = True
            self._usage.cached_device_tokens = cached.device_tokens
            self._usage.cached_host_tokens = cached.host_tokens

    def advance(self, outputs: Sequence[SequenceOutput], abort: Callable[[int], None]) -> list[GenerateEvent]:
        """All that came at once, as one delta per choice. The group is told of a choice that is over and that it would
        go on with."""
        events: list[GenerateEvent] = []
        deltas: dict[int, Delta] = {}
        for output in outputs:
            if output.prompt_logprobs and (scored := self._score(output)) is not None:
                events.append(GenerateEvent(prompt_logprobs=scored))
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
                abort(index)
        return events

    def ends(self) -> list[ChoiceEnd]:
        """How each choice has ended."""
        return [
            ChoiceEnd(
                choice=choice.index,
                finish_reason=choice.finish_reason,
                completion_tokens=len(choice.token_ids),
            )
            for choice in self._choices
        ]

    def _score(self, output: SequenceOutput) -> PromptLogprobs | None:
        """What the client does not have yet of the next prompt tokens' log-probabilities; None if it has them all."""
        part = output.prompt_logprobs
        known = self._echoed - self._scored
        self._scored += len(part)
        self._echoed = max(self._echoed, self._scored)
        if known >= len(part):
            return None
        fresh = PromptLogprobs()
        fresh.tokens.MergeFrom(part)  # in C: a Python object for each would take ten times as long
        del fresh.tokens[:known]
        return fresh
