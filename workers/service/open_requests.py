"""OpenRequests: the submissions that a group is answering, each until its last choice ends.

Two threads meet here: the service's opens and aborts, the engine's closes. A ticket leaves once, whoever takes it out;
its end is logged by that one. It knows no gRPC, and not what a token means.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.step_output import SequenceOutput
from coatcheck.workers.service.outbox import Outbox
from coatcheck.workers.service.request_log import LoggedRequest, RequestLog


@dataclass(slots=True)
class OpenRequest:
    """One submission that is being answered; `choices` are those not yet finished, `answer` is for the log."""

    subscriber: Outbox
    submit_id: int
    attempt: int
    answer: LoggedRequest
    choices: set[int] = field(default_factory=set)


class OpenRequests:
    """By the engine's request id."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._open))

    def get(self, key: str) -> OpenRequest | None:
        """None: it has ended, or there was none."""
        return self._open.get(key)

    def open(self, key: str, subscriber: Outbox, submit: wire.Submit, choices: int) -> None:
        """Its answer begins."""
        assert key not in self._open, f"{key} is open"
        carrier = {"traceparent": submit.traceparent, "tracestate": submit.tracestate}
        answer = self._log.begin(submit.request_id, len(submit.prompt_token_ids), carrier)
        self._open[key] = OpenRequest(subscriber, submit.id, submit.attempt, answer, set(range(choices)))

    def wrote(self, key: str, ticket: OpenRequest, output: SequenceOutput) -> None:
        """An output of it is on its way; the ticket ends with its last choice."""
        self._log.wrote(ticket.answer, output)
        if output.finish_reason is not None:
            self.close_choice(key, ticket, output.choice)

    def close_choice(self, key: str, ticket: OpenRequest, choice: int) -> None:
        """One choice has ended, by itself or by its client."""
        ticket.choices.discard(choice)
        if not ticket.choices:
            self.end(key, "ok")

    def end(self, key: str, outcome: str) -> OpenRequest | None:
        """Takes it out, if nobody has yet: "ok", "aborted" or "refused: ..."."""
        if (ticket := self._open.pop(key, None)) is not None:
            self._log.end(ticket.answer, outcome)
        return ticket

    def of(self, subscriber: Outbox) -> list[str]:
        """Those of one router."""
        return [key for key, ticket in list(self._open.items()) if ticket.subscriber is subscriber]

    def check(self) -> None:
        """Raises AssertionError if an ended one is still here."""
        for key, ticket in list(self._open.items()):
            assert ticket.choices, f"{key} has no choice left"
