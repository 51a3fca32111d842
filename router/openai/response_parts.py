"""What chat completions and text completions have in common: their first fields, usage and finish reasons."""

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
FINISH_REASONS: Final[dict[int, str | None]] = {0: None, FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}
quote = json.encoder.encode_basestring_ascii  # json.dumps of a string, without its overhead


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The first fields of a response and of each of its chunks."""

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, kind: str) -> dict[str, Any]:
        """`kind`: the `object` field."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage_object(usages: Iterable[Usage], scores_only: bool = False) -> dict[str, Any]:
    """The `usage` of a response, summed over its prompts. `scores_only`: the generated token does not count."""
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
    """The `usage` of a stream so far, summed over its prompts."""

    def __init__(self) -> None:
        self._prompt = 0
        self._completion = 0

    def count_event(self, event: GenerateEvent) -> None:
        self._prompt += event.started.prompt_tokens
        self._completion += len(event.delta.token_ids)

    def to_json(self) -> dict[str, int]:
        total = self._prompt + self._completion
        return {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}


def count_values(deltas: Iterable[Delta]) -> int:
    """About how many JSON values the deltas become; see count_text for their texts."""
    count = 0
    for delta in deltas:
        tops = len(delta.logprobs[0].top) if delta.logprobs else 0
        count += len(delta.token_ids) + len(delta.logprobs) * (1 + tops) + count_text(delta.text)
    return count


def count_text(text: str) -> int:
    """The number of short JSON values that take as long to encode as `text`."""
    return len(text) // _CHARACTERS_PER_VALUE


def count_scored(logprobs: PromptLogprobs) -> int:
    """About how many JSON values a prompt's log-probabilities become."""
    return len(logprobs.tokens) * (1 + len(logprobs.tokens[0].top)) if logprobs.tokens else 0


def stop_reason(delta: Delta) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or stop token that ended a choice."""
    stopped_by = delta.WhichOneof("stopped_by")
    return getattr(delta, stopped_by) if stopped_by else None
