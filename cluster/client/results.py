"""GenerationResult: everything that a server has sent for one request, as plain Python values."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token. `rank` 1 is the most likely token. `top` maps the most likely token ids to
    their log-probabilities; it is empty unless the request asked for them."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: pb.TokenLogprob) -> Self:
        top = {top.token_id: top.logprob for top in message.top}
        if message.all_logprobs:
            values = enumerate(np.frombuffer(message.all_logprobs, dtype="<f4").tolist())
            top = dict(sorted(values, key=lambda value: -value[1]))
        return cls(message.token_id, message.logprob, message.rank, top)

    def to_json(self) -> dict[str, Any]:
        top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in self.top.items()]
        return {"token_id": self.token_id, "logprob": self.logprob, "rank": self.rank, "top": top}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, or a piece of one in a chunk. `index`: the call's number within its choice. The first piece of
    a call has its `id` and `name`; `arguments`: JSON text, to be joined with that of the other pieces."""

    index: int
    arguments: str = ""
    name: str = ""
    id: str = ""

    @classmethod
    def from_message(cls, message: pb.ToolCallDelta) -> Self:
        return cls(message.index, message.arguments, message.name, message.id)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "arguments": self.arguments}


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """The next part of one choice of a stream. `finish_reason` is set on the choice's last chunk. `reasoning` and
    `tool_calls`: see the option split_output."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def from_message(cls, delta: pb.Delta) -> Self:
        stopped_by = delta.WhichOneof("stopped_by")
        return cls(
            choice=delta.choice,
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            logprobs=tuple(map(Logprob.from_message, delta.logprobs)),
            finish_reason=_finish_reason(delta.finish_reason),
            stopped_by=getattr(delta, stopped_by) if stopped_by else None,
            reasoning=delta.reasoning,
            tool_calls=tuple(map(ToolCall.from_message, delta.tool_calls)),
        )


@dataclass(slots=True)
class GenerationChoice:
    """One of the `n` answers to a request. `reasoning` and `tool_calls`, each whole: see the option split_output.

    `finish_reason`: "stop" or "length"; None while the choice runs. `stopped_by`: the stop string or the stop token's
    id, if one of them ended the choice.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stopped_by: str | int | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def append(self, chunk: GenerationChunk) -> None:
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stopped_by = self.stopped_by if chunk.stopped_by is None else chunk.stopped_by
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(piece)
            else:
                call = self.tool_calls[piece.index]
                self.tool_calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)

    def to_json(self, *, logprobs: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stopped_by": self.stopped_by,
        }
        if logprobs:
            fields["logprobs"] = [token.to_json() for token in self.logprobs]
        if self.reasoning:
            fields["reasoning"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [call.to_json() for call in self.tool_calls]
        return fields


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request. The cached counts are prompt tokens whose keys and values were in the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0


@dataclass(slots=True)
class GenerationResult:
    """The answer to one request; it grows while a stream runs.

    `began`: when the request was sent, in seconds of the clock that `now` of `add` comes from. `group`: the group
    that finished the request. `routed_by`: why the router chose that group. `moves`: how often the request moved to
    another group.
    """

    began: float
    request_id: str = ""
    model: str = ""
    seed: int = 0
    group: str = ""
    routed_by: str = ""
    moves: int = 0
    choices: list[GenerationChoice] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    usage: TokenUsage = field(default_factory=TokenUsage)
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids if self.choices else []

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the first choice."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.began

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token, over all choices."""
        if self.first_token_at is None or self.ended_at is None or self.ended_at <= self.first_token_at:
            return None
        later = self.usage.completion_tokens - len(self.choices)
        return later / (self.ended_at - self.first_token_at) if later > 0 else None

    def add(self, event: pb.GenerateEvent, now: float) -> GenerationChunk | None:
        """Add the next event of the stream. Return its chunk if the event is a delta."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            return self._append(GenerationChunk.from_message(event.delta), now)
        if kind == "started":
            self.request_id, self.model, self.seed = event.started.request_id, event.started.model, event.started.seed
            self.group = event.started.group
        elif kind == "prompt_logprobs":
            self.prompt_logprobs.extend(map(Logprob.from_message, event.prompt_logprobs.tokens))
        elif kind == "final":
            self._finish(event.final, now)
        return None

    def summary(self) -> str:
        """One sentence for a person: the group, the token counts and the speed."""
        usage = self.usage
        cached = usage.cached_device_tokens + usage.cached_host_tokens
        parts = [f"{counted(usage.prompt_tokens, 'prompt token')}, {cached or 'none'} cached"]
        if usage.cached_host_tokens:
            parts[0] += f" ({usage.cached_host_tokens} in host memory)"
        parts.append(f"{usage.completion_tokens} generated")
        if self.ttft is not None:
            parts[-1] += f", the first after {self.ttft * 1000:.0f} ms"
        if self.decode_rate is not None:
            parts[-1] += f", then {self.decode_rate:.0f} a second"
        if self.moves:
            parts.append(f"moved {counted(self.moves, 'time')} to another group")
        return f"{self.group}: {'; '.join(parts)}"

    def to_json(self, *, logprobs: bool = False, prompt_logprobs: bool = False) -> dict[str, Any]:
        """The object of `coatcheck generate --json`. Its text, ids and reason are the first choice's; `choices` has all
        choices when there are several."""
        choices = [choice.to_json(logprobs=logprobs) for choice in self.choices]
        usage = self.usage
        answer: dict[str, Any] = {
            **(choices[0] if choices else GenerationChoice().to_json(logprobs=logprobs)),
            "usage": {
                "prompt": usage.prompt_tokens,
                "completion": usage.completion_tokens,
                "cached_device": usage.cached_device_tokens,
                "cached_host": usage.cached_host_tokens,
            },
            "group": self.group,
            "routed_by": self.routed_by,
            "moves": self.moves,
            "seed": self.seed,
            "request_id": self.request_id,
            "model": self.model,
            "ttft_seconds": self.ttft,
            "seconds": None if self.ended_at is None else self.ended_at - self.began,
        }
        if len(choices) > 1:
            answer["choices"] = choices
        if prompt_logprobs:
            answer["prompt_logprobs"] = [token.to_json() for token in self.prompt_logprobs]
        return answer

    def _append(self, chunk: GenerationChunk, now: float) -> GenerationChunk:
        if self.first_token_at is None:
            self.first_token_at = now
        while len(self.choices) <= chunk.choice:
            self.choices.append(GenerationChoice())
        self.choices[chunk.choice].append(chunk)
        return chunk

    def _finish(self, final: pb.Final, now: float) -> None:
        self.group, self.routed_by, self.moves = final.group, final.routed_by, final.moves
        self.usage = TokenUsage(
            final.usage.prompt_tokens,
            final.usage.completion_tokens,
            final.usage.cached_device_tokens,
            final.usage.cached_host_tokens,
        )
        self.ended_at = now


def _finish_reason(reason: pb.FinishReason) -> str | None:
    """The lower-case name of a finish reason: "stop" or "length"."""
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if reason else None
