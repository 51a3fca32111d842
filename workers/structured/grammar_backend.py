"""GrammarBackend: compiled grammars over one model's vocabulary, and matchers that follow a sequence along one.

Compiling takes a millisecond, or hundreds of a large one, and is done once per grammar: later sequences copy what was
compiled. Every rank has its own and feeds it the same tokens, so all make the same masks. It does not know slots, steps
or devices, nor how long a grammar is wanted: GrammarRegistry does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar, why_unusable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Of the processor, for the tokens that a request resumes with. Of 300 optional properties each takes 0.2 ms.
_RESUME_SECONDS: Final = 1.0
_RESUME_TOKENS: Final = 8  # between two looks at the clock


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What came of a grammar: `start` is a matcher behind no token, or `error` says why there is none."""

    start: LLMatcher | None = None
    error: InvalidRequest | None = None


class GrammarBackend:
    """Of one rank, by the numbers that all ranks know them by. `missing` says why there are none: then every grammar is
    refused, with it."""

    def __init__(self, tokenizer: LLTokenizer | None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self._missing = missing
        self._kept: dict[int, CompiledGrammar] = {}

    @classmethod
    def load(cls, model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
        """Over the vocabulary of a checkpoint; one whose tokens cannot be read serves all else."""
        if not eos_token_ids:
            return cls(None, "this model has no end-of-sequence token, with which structured output ends")
        try:
            from llguidance import LLTokenizer  # late, as in proto/grammar.py

            path = model / "tokenizer.json"
            text = path.read_text(encoding="utf-8") if path.is_file() else _converted(model)
            return cls(LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids)))
        except Exception as error:  # whatever a library says of a file that it cannot take
            return cls(None, f"this model's tokenizer cannot be used for structured output: {error}")

    def require(self) -> LLTokenizer:
        """Raises InvalidRequest where there can be none."""
        if self._tokenizer is None:
            raise InvalidRequest(f"{self._missing}; leave structured output out")
        return self._tokenizer

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Anew, in whichever thread; nothing is kept."""
        try:
            tokenizer = self.require()
            from llguidance import LLMatcher
            from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

            matcher = LLMatcher(tokenizer, grammar.compiled(), log_level=0)
            if matcher.is_error():
                raise grammar.refused(matcher.get_error())
            # The first mask of a large grammar takes milliseconds too, and copies have what has been found for it. A
            # grammar that allows no first token is refused here, in no step, and its memory (up to 80 MB) is free.
            bits = allocate_token_bitmask(1, tokenizer.vocab_size)
            fill_next_token_bitmask(matcher, bits)
            if matcher.is_error() or not bits.any():
                raise grammar.refused(why_unusable(matcher))
        except InvalidRequest as error:
            return CompiledGrammar(error=error)
        return CompiledGrammar(matcher)

    def keep(self, number: int, compiled: CompiledGrammar) -> None:
        """For the sequences to come, until `drop`. As `matcher`, in the thread of the steps alone."""
        self._kept[number] = compiled

    def drop(self, number: int) -> None:
        """No sequence to come has it."""
        del self._kept[number]

    def matcher(self, number: int, said: Sequence[int] = ()) -> LLMatcher:
        """One of a grammar that is kept, behind the tokens `said`; raises InvalidRequest where there can be none."""
        compiled = self._kept[number]
        if compiled.start is None:
            assert compiled.error is not None
            raise compiled.error
        matcher = compiled.start.deep_copy()
        if said and not matcher.consume_tokens(list(said)):
            raise InvalidRequest("resume holds tokens that the structured output cannot have; send those delivered")
        return matcher

    def check(self, number: int, said: Sequence[int]) -> None:
        """As `matcher`, once for each request; raises InvalidRequest too where following `said` takes too long."""
        matcher, ends_at = self.matcher(number), time.thread_time() + _RESUME_SECONDS
        for start in range(0, len(said), _RESUME_TOKENS):
            if not matcher.consume_tokens(list(said[start : start + _RESUME_TOKENS])):
                raise InvalidRequest("resume holds tokens that the structured output cannot have; send those delivered")
            if time.thread_time() > ends_at:
                raise InvalidRequest(
                    f"to follow the structured output through the {len(said)} tokens of resume takes over "
                    f"{_RESUME_SECONDS:g} s of a processor; make its grammar simpler"
                )


def _converted(model: Path) -> str:
    from transformers import AutoTokenizer  # imported late: it takes a while, and most checkpoints need none of it

    text: str = AutoTokenizer.from_pretrained(model).backend_tokenizer.to_str()
    return text
