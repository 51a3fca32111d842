"""ResponseBuilder: turns the outputs of a request's groups, one group after another, into events for the client.

It keeps the tokens that the client has, which the next group must not send again.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from coatcheck.proto.stubs.coatcheck_pb2 import ChoiceEnd, Delta, GenerateEvent, PromptLogprobs, Usage
from coatcheck.proto.stubs.worker_pb2 import FirstOutput, SequenceOutput
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.choice import Choice
from coatcheck.router.text.detokenizer import Detokenizer


class ResponseBuilder:
    """Call `start_choices` for the first group, `start_next_group` for each further one, and `add_outputs` for all that
    they send."""

    def __init__(self, request: Request) -> None:
        self._usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._request = request
        self._choices: list[Choice] = []
        self.embedding: Sequence[float] = ()  # of the prompt, if the request asks for it
        self._has_first_output = False  # whether any group has sent its first output
        # Numbers of prompt log-probabilities: those that the client has, and those that the present group has sent.
        # Each group sends all of them.
        self._delivered_logprobs = self._group_logprobs = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        self._usage.completion_tokens = self.completion_tokens
        return self._usage

    @property
    def completion_tokens(self) -> int:
        """Tokens delivered so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def has_output(self) -> bool:
        """Whether the client has any output: tokens, or log-probabilities of the prompt."""
        return bool(self.completion_tokens or self._delivered_logprobs)

    @property
    def delivered(self) -> Mapping[int, Sequence[int]]:
        """Tokens by choice that the client has, from this router or from an earlier one."""
        return {choice.index: choice.token_ids for choice in self._choices} or self._request.resume

    @property
    def ended_choices(self) -> list[int]:
        """Indices of the choices that have ended."""
        return [choice.index for choice in self._choices if choice.finish_reason]

    @property
    def is_complete(self) -> bool:
        """Whether all choices have ended."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices)

    def start_choices(self, eos: AbstractSet[int], make_detokenizer: Callable[[], Detokenizer]) -> list[Delta]:
        """Creates the choices with the tokens that the client has. Returns a delta for each choice that these tokens
        end."""
        sampling = self._request.sampling
        deltas = []
        for index in range(sampling.n):
            choice = Choice(index, make_detokenizer(), sampling.stop, eos, sampling.include_stop)
            self._choices.append(choice)
            delta = choice.resume_from(self._request.resume.get(index, ()))
            if delta is not None:
                deltas.append(delta)
        return deltas

    def start_next_group(self, eos: AbstractSet[int]) -> None:
        """Expects outputs of another group from now on. `eos`: its end-of-sequence tokens, which differ from those of
        the group before if the two are of different kinds."""
        self._group_logprobs = 0
        for choice in self._choices:
            choice.eos = eos

    def record_first_output(self, first_output: FirstOutput) -> None:
        """Records the cached prompt tokens of a group's first output. Only the first group's count."""
        if not self._has_first_output:
            self._has_first_output = True
            self._usage.cached_device_tokens = first_output.device_tokens
            self._usage.cached_host_tokens = first_output.host_tokens

    def add_outputs(self, outputs: Sequence[SequenceOutput], abort: Callable[[int], None]) -> list[GenerateEvent]:
        """The events for outputs that were read together: one delta for each choice. `abort` is called with each choice
        that a stop string has ended, because the group does not see stop strings."""
        events: list[GenerateEvent] = []
        deltas: dict[int, Delta] = {}
        for output in outputs:
            if output.embedding:
                self.embedding = output.embedding
            if output.prompt_logprobs and (fresh := self._fresh_logprobs(output)) is not None:
                events.append(GenerateEvent(prompt_logprobs=fresh))
            index = output.choice
            choice = self._choices[index]
            if choice.finish_reason or not (output.token_ids or output.finish_reason):
                continue  # the choice has ended, or its prompt is still being computed
            delta = deltas.get(index)
            if delta is None:
                event = GenerateEvent()
                events.append(event)
                delta = deltas[index] = event.delta
                delta.choice = index
            choice.add_output(output, delta)
            if choice.finish_reason and not output.finish_reason:
                abort(index)
        return events

    def choice_ends(self) -> list[ChoiceEnd]:
        """How each choice has ended."""
        return [
            ChoiceEnd(
                choice=choice.index,
                finish_reason=choice.finish_reason,
                completion_tokens=len(choice.token_ids),
            )
            for choice in self._choices
        ]

    def _fresh_logprobs(self, output: SequenceOutput) -> PromptLogprobs | None:
        """The prompt log-probabilities in `output` that the client does not have; None if it has all of them."""
        part = output.prompt_logprobs
        known = self._delivered_logprobs - self._group_logprobs
        self._group_logprobs += len(part)
        self._delivered_logprobs = max(self._delivered_logprobs, self._group_logprobs)
        if known >= len(part):
            return None
        fresh = PromptLogprobs()
        fresh.tokens.MergeFrom(part)  # a Python object for each would take ten times as long
        del fresh.tokens[:known]
        return fresh
