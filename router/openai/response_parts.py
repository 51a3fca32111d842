"""What the answers of both generating endpoints have in common: their head, their usage, their reasons to end."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Delta,
    GenerateEvent,
    PromptLogprobs,
    Usage,
)

_CHARACTERS_PER_VALUE: Final = 64
DONE: Final = b"data: [DONE]\n\n"
REASONS: Final[dict[int, str | None]] = {0: None, FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}
quote = json.encoder.encode_basestring_ascii  # what json.dumps does with a string, without its other work


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object and every chunk of one answer begins with."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, kind: str) -> dict[str, Any]:
        """The first fields of an object."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def server_sent(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def usage_json(usages: Iterable[Usage], scores_only: bool = False) -> dict[str, Any]:
    """Over all prompts of a request."""
    usages = list(usages)
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = 0 if scores_only else sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_device_tokens + usage.cached_host_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class RunningUsage:
    """What a stream has taken so far, over all of its prompts."""

    def __init__(self) -> None:
        self._prompt = 0
        self._completion = 0

    def see(self, event: GenerateEvent) -> None:
        """Whatever it says."""
        self._prompt += event.started.prompt_tokens
        self._completion += len(event.delta.token_ids)

    def to_json(self) -> dict[str, int]:
        """As a chunk's usage."""
        total = self._prompt + self._completion
        return {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}


def count_values(deltas: Iterable[Delta]) -> int:
    """About how many values the JSON of these deltas has; a long text takes as long to write as many of them."""
    count = 0
    for delta in deltas:
        tops = len(delta.logprobs[0].top) if delta.logprobs else 0
        count += len(delta.token_ids) + len(delta.logprobs) * (1 + tops) + count_text(delta.text)
    return count


def count_text(text: str) -> int:
    """How many values take as long to write."""
    return len(text) // _CHARACTERS_PER_VALUE


def count_scored(logprobs: PromptLogprobs) -> int:
    """About how many values the JSON of a prompt's log-probabilities has."""
    return len(logprobs.tokens) * (1 + len(logprobs.tokens[0].top)) if logprobs.tokens else 0


def stop_reason(delta: Delta) -> str | int | None:
    """The stop string or stop token that ended a choice."""
    stopped_by = delta.WhichOneof("stopped_by")
    return getattr(delta, stopped_by) if stopped_by else None
