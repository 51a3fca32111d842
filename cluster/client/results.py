"""GenerationResult: the events of one stream put together, and the object that `coatcheck generate --json` prints."""

from dataclasses import dataclass, field
from typing import Any

from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb


@dataclass(slots=True)
class GenerationChoice:
    """One of the n answers, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stopped_by: str | int | None = None

    def add(self, delta: pb.Delta) -> None:
        """Takes this choice's next delta."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            self.finish_reason = pb.FinishReason.Name(delta.finish_reason).removeprefix("FINISH_REASON_").lower()
        if stopped_by := delta.WhichOneof("stopped_by"):
            self.stopped_by = getattr(delta, stopped_by)


class GenerationResult:
    """Everything that one request has brought. Times are seconds since `began`."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.started = pb.Started()
        self.final = pb.Final()
        self.choices: dict[int, GenerationChoice] = {}
        self.prompt_logprobs: list[pb.TokenLogprob] = []

    def add(self, event: pb.GenerateEvent, now: float) -> None:
        """Takes the stream's next event."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            if self.first_token_at is None:
                self.first_token_at = now
            self.choices.setdefault(event.delta.choice, GenerationChoice()).add(event.delta)
        elif kind == "started":
            self.started = event.started
        elif kind == "prompt_logprobs":
            self.prompt_logprobs.extend(event.prompt_logprobs.tokens)
        elif kind == "final":
            self.final = event.final
            self.ended_at = now

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.began

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first, over all choices."""
        if self.first_token_at is None or self.ended_at is None or self.ended_at <= self.first_token_at:
            return None
        later = self.final.usage.completion_tokens - len(self.choices)
        return later / (self.ended_at - self.first_token_at) if later > 0 else None

    def summary(self) -> str:
        """A sentence for a person: where it ran, and what it took."""
        usage = self.final.usage
        cached = usage.cached_device_tokens + usage.cached_host_tokens
        parts = [f"{counted(usage.prompt_tokens, 'prompt token')}, {cached or 'none'} cached"]
        if usage.cached_host_tokens:
            parts[0] += f" ({usage.cached_host_tokens} in host memory)"
        parts.append(f"{usage.completion_tokens} generated")
        if self.ttft is not None:
            parts[-1] += f", the first after {self.ttft * 1000:.0f} ms"
        if self.decode_rate is not None:
            parts[-1] += f", then {self.decode_rate:.0f} a second"
        if self.final.moves:
            parts.append(f"moved {counted(self.final.moves, 'time')} to another group")
        return f"{self.final.group}: {'; '.join(parts)}"

    def to_json(self, *, logprobs: bool, prompt_logprobs: bool) -> dict[str, Any]:
        """The object of --json; with n > 1 its text, ids and reason are the first choice's, and `choices` has all."""
        choices = [_choice_json(choice, logprobs) for _, choice in sorted(self.choices.items())]
        usage = self.final.usage
        answer: dict[str, Any] = {
            **(choices[0] if choices else _choice_json(GenerationChoice(), logprobs)),
            "usage": {
                "prompt": usage.prompt_tokens,
                "completion": usage.completion_tokens,
                "cached_device": usage.cached_device_tokens,
                "cached_host": usage.cached_host_tokens,
            },
            "group": self.final.group,
            "routed_by": self.final.routed_by,
            "moves": self.final.moves,
            "seed": self.started.seed,
            "request_id": self.started.request_id,
            "model": self.started.model,
            "ttft_seconds": self.ttft,
            "seconds": None if self.ended_at is None else self.ended_at - self.began,
        }
        if len(choices) > 1:
            answer["choices"] = choices
        if prompt_logprobs:
            answer["prompt_logprobs"] = [logprob_json(token) for token in self.prompt_logprobs]
        return answer


def _choice_json(choice: GenerationChoice, logprobs: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stopped_by": choice.stopped_by,
    }
    if logprobs:
        made["logprobs"] = [logprob_json(token) for token in choice.logprobs]
    return made


def logprob_json(token: pb.TokenLogprob) -> dict[str, Any]:
    """One token's log-probability, its rank, and the most likely tokens where they were asked for."""
    return {
        "token_id": token.token_id,
        "logprob": token.logprob,
        "rank": token.rank,
        "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in token.top],
    }
