"""SamplingParams: the sampling settings of one request, with defaults filled in and bounds checked.

In the wire message scalars may be unset. Routers and workers use this class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from coatcheck.proto.errors import InvalidParameter
from coatcheck.proto.grammar import Grammar

if TYPE_CHECKING:
    from coatcheck.proto.stubs.coatcheck_pb2 import ReasoningLimit as LimitMessage
    from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage

MAX_CHOICES = 64
MAX_LOGPROBS = 20  # the default of serve --max-logprobs
ALL_LOGPROBS = -1
MAX_LOGPROB_IDS = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
NO_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({})
MAX_STOP_IDS = 256
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1 << 18
MAX_BAD_WORDS = 256  # texts, and sequences of token ids
MAX_BAD_WORD_TOKENS = 64
MAX_MARKER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """See coatcheck.proto."""

    max_tokens: int
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise InvalidRequest that names the field, its value and the allowed values."""
        name = "reasoning_limit"
        _require(0 <= self.max_tokens < 2**31, f"{name}.max_tokens", self.max_tokens, "from 0 to 2^31 - 1")
        _require(bool(self.end_token_ids), f"{name}.end_token_ids", "empty", "at least one token id")
        for part in ("start_token_ids", "end_token_ids"):
            _limit(f"{name}.{part}", len(getattr(self, part)), MAX_MARKER_TOKENS, "ids")

    @classmethod
    def from_message(cls, message: LimitMessage) -> Self:
        """From the wire. Raises InvalidRequest."""
        return cls(message.max_tokens, tuple(message.start_token_ids), tuple(message.end_token_ids))

    def to_message(self) -> LimitMessage:
        from coatcheck.proto.stubs.coatcheck_pb2 import ReasoningLimit as LimitMessage  # see grammar.py

        return LimitMessage(
            max_tokens=self.max_tokens, start_token_ids=self.start_token_ids, end_token_ids=self.end_token_ids
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`max_tokens` None: the rest of the context. Other fields: see coatcheck.proto."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop: bool = False
    structured: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    max_reasoning_tokens: int | None = None
    reasoning_limit: ReasoningLimit | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest that names the field, its value and the allowed values."""
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "in [0, 100]")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or a count below 2^31")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        _require(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "in (0, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "in [-2, 2]")
        for token, bias in self.logit_bias.items():
            _require(math.isfinite(bias) and abs(bias) <= 1000.0, f"logit_bias[{token}]", bias, "in [-1000, 1000]")
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "a 64-bit unsigned integer")
        _require(1 <= self.n <= MAX_CHOICES, "n", self.n, f"from 1 to {MAX_CHOICES}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            is_count = count is None or ALL_LOGPROBS <= count < 2**31
            _require(is_count, name, count, "a count from 0, or -1 for all tokens")
        _limit("logprob_token_ids", len(self.logprob_token_ids), MAX_LOGPROB_IDS, "ids")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidParameter("logprob_token_ids", "needs logprobs; set logprobs, or remove it")
        _limit("stop", len(self.stop), MAX_STOPS, "strings")
        _require(all(self.stop), "stop", "''", "strings of at least one character")
        longest = max(map(len, self.stop), default=0)
        _limit("stop", longest, MAX_STOP_LENGTH, "characters in one string")
        _limit("stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS, "ids")
        if self.structured is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            allowed = "unset with structured output, which ends when it is complete"
            _require(False, name, getattr(self, name), allowed)
        _limit("logit_bias", len(self.logit_bias), MAX_BIASES, "entries")
        self._check_masks()
        budget = self.max_reasoning_tokens
        _require(budget is None or 0 <= budget < 2**31, "max_reasoning_tokens", budget, "from 0 to 2^31 - 1")

    def _check_masks(self) -> None:
        """Check the fields that forbid tokens. Two of them that could forbid every token together are refused."""
        _limit("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_IDS, "ids")
        _limit("bad_words", len(self.bad_words), MAX_BAD_WORDS, "texts")
        _require(all(map(str.strip, self.bad_words)), "bad_words", "an empty text", "texts that are not white space")
        _limit("bad_words", max(map(len, self.bad_words), default=0), MAX_STOP_LENGTH, "characters in one text")
        _limit("bad_token_ids", len(self.bad_token_ids), 2 * MAX_BAD_WORDS, "sequences")
        _require(all(self.bad_token_ids), "bad_token_ids", "an empty list", "lists of at least one token id")
        _limit("bad_token_ids", max(map(len, self.bad_token_ids), default=0), MAX_BAD_WORD_TOKENS, "ids in one list")
        if self.structured is not None and (self.bad_words or self.bad_token_ids):
            name = "bad_words" if self.bad_words else "bad_token_ids"
            raise InvalidParameter(name, "does not go with structured output; remove one of them")
        if not self.allowed_token_ids:
            return
        for name in ("bad_words", "bad_token_ids", "structured", "min_tokens"):
            if getattr(self, name):
                raise InvalidParameter(name, "does not go with allowed_token_ids; remove one of them")

    @classmethod
    def from_message(cls, message: SamplingMessage, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Self:
        """From the wire. An unset field has the value in `defaults`, else its own default. Raises InvalidRequest."""
        # Checked first, so that a refused list of millions of ids is never copied.
        _limit("stop_token_ids", len(message.stop_token_ids), MAX_STOP_IDS, "ids")
        _limit("allowed_token_ids", len(message.allowed_token_ids), MAX_ALLOWED_IDS, "ids")
        _limit("logprob_token_ids", len(message.logprob_token_ids), MAX_LOGPROB_IDS, "ids")
        limit = message.reasoning_limit
        for sequence in message.bad_token_ids:
            _limit("bad_token_ids", len(sequence.ids), MAX_BAD_WORD_TOKENS, "ids in one list")
        present = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
        return cls(
            **{**defaults, **present},
            logit_bias=dict(message.logit_bias),
            stop=tuple(message.stop),
            stop_token_ids=tuple(message.stop_token_ids),
            logprob_token_ids=tuple(message.logprob_token_ids),
            structured=Grammar.from_message(message.structured) if message.HasField("structured") else None,
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words=tuple(message.bad_words),
            bad_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_token_ids),
            reasoning_limit=ReasoningLimit.from_message(limit) if message.HasField("reasoning_limit") else None,
        )

    def to_message(self) -> SamplingMessage:
        """The wire form. Scalars that are not None are set."""
        from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage  # see grammar.py
        from coatcheck.proto.stubs.coatcheck_pb2 import TokenIds

        scalars = {name: getattr(self, name) for name in _SCALARS if getattr(self, name) is not None}
        return SamplingMessage(
            **scalars,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprob_token_ids=self.logprob_token_ids,
            structured=self.structured.to_message() if self.structured is not None else None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            bad_token_ids=[TokenIds(ids=ids) for ids in self.bad_token_ids],
            reasoning_limit=self.reasoning_limit.to_message() if self.reasoning_limit is not None else None,
        )

    def check_model(self, vocab_size: int) -> None:
        """Raise InvalidRequest for a token id that the model does not have."""
        limit = self.reasoning_limit
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            *(("bad_token_ids", sequence) for sequence in self.bad_token_ids),
            ("reasoning_limit", (*limit.start_token_ids, *limit.end_token_ids) if limit is not None else ()),
        ):
            for token in ids:
                _require(0 <= token < vocab_size, f"{name} entry", token, f"a token id below {vocab_size}")


_NOT_SCALAR = (
    "logit_bias", "stop", "stop_token_ids", "structured", "allowed_token_ids", "bad_words", "bad_token_ids",
    "reasoning_limit", "logprob_token_ids",
)  # fmt: skip
_SCALARS = tuple(field.name for field in fields(SamplingParams) if field.name not in _NOT_SCALAR)


def _limit(name: str, count: int, maximum: int, what: str) -> None:
    if count > maximum:
        raise InvalidParameter(name, f"has {count} {what}; the maximum is {maximum}")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    # Comparisons with NaN are false, so every range refuses NaN.
    if not holds:
        raise InvalidParameter(name, f"is {value}; it must be {allowed}")
