"""GrammarBackend: the grammars that one rank has compiled over its model's vocabulary (llguidance).

Compiling takes 1 to 400 ms and is done once per grammar. Each sequence then gets a copy of the compiled matcher. Every
rank has a backend and feeds it the same tokens, so all ranks compute the same masks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar, describe_matcher_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# CPU time to match the tokens of `resume`. In a schema with 300 optional properties a token takes 0.2 ms.
_MAX_RESUME_SECONDS: Final = 1.0
_TOKENS_PER_CLOCK_CHECK: Final = 8


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Either a `matcher` that has consumed no token, or an `error`."""

    matcher: LLMatcher | None = None
    error: InvalidRequest | None = None


class GrammarBackend:
    """Compiled grammars by id. Without a `tokenizer` every grammar is refused with the text `why_missing`."""

    def __init__(self, tokenizer: LLTokenizer | None, why_missing: str = "") -> None:
        self._tokenizer = tokenizer
        self._why_missing = why_missing
        self._compiled: dict[int, CompiledGrammar] = {}

    @classmethod
    def load(cls, model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
        """Read a checkpoint's tokenizer. If that fails, the backend refuses grammars and all else is served."""
        if not eos_token_ids:
            return cls(None, "this model has no end-of-sequence token, with which structured output ends")
        try:
            from llguidance import LLTokenizer  # imported late, as in proto/grammar.py

            path = model / "tokenizer.json"
            text = path.read_text(encoding="utf-8") if path.is_file() else _convert_tokenizer(model)
            return cls(LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids)))
        except Exception as error:  # the libraries raise many types for a file that they cannot read
            return cls(None, f"this model's tokenizer cannot be used for structured output: {error}")

    def require_tokenizer(self) -> LLTokenizer:
        """Raises InvalidRequest if the model has no usable tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequest(f"{self._why_missing}; remove structured output")
        return self._tokenizer

    def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar without storing the result. May run in any thread."""
        try:
            tokenizer = self.require_tokenizer()
            from llguidance import LLMatcher
            from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

            matcher = LLMatcher(tokenizer, grammar.to_llguidance(), log_level=0)
            if matcher.is_error():
                raise grammar.compile_error(matcher.get_error())
            # Computing the first mask of a large grammar takes milliseconds. Copies of the matcher inherit the result.
            # A grammar that allows no first token is refused here, before a step depends on it.
            bits = allocate_token_bitmask(1, tokenizer.vocab_size)
            fill_next_token_bitmask(matcher, bits)
            if matcher.is_error() or not bits.any():
                raise grammar.compile_error(describe_matcher_error(matcher))
        except InvalidRequest as error:
            return CompiledGrammar(error=error)
        return CompiledGrammar(matcher)

    def store(self, grammar_id: int, compiled: CompiledGrammar) -> None:
        """Keep a compiled grammar until `drop`. Call this and the methods below only in the thread that steps."""
        self._compiled[grammar_id] = compiled

    def drop(self, grammar_id: int) -> None:
        del self._compiled[grammar_id]

    def create_matcher(self, grammar_id: int, token_ids: Sequence[int] = ()) -> LLMatcher:
        """A new matcher of a stored grammar that has consumed `token_ids`.

        Raises InvalidRequest if the grammar did not compile or does not allow `token_ids`.
        """
        compiled = self._compiled[grammar_id]
        if compiled.matcher is None:
            assert compiled.error is not None
            raise compiled.error
        matcher = compiled.matcher.deep_copy()
        _consume(matcher, token_ids)
        return matcher

    def check_resume(self, grammar_id: int, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest as `create_matcher` does, and if consuming `token_ids` takes too long."""
        matcher, ends_at = self.create_matcher(grammar_id), time.thread_time() + _MAX_RESUME_SECONDS
        start, count = 0, len(token_ids)
        while start < count:
            # A matcher whose grammar is complete refuses an end token that comes alone, but accepts it behind another
            # token of the same call. So the last token shares its call with the one before it.
            end = count if count - start <= _TOKENS_PER_CLOCK_CHECK + 1 else start + _TOKENS_PER_CLOCK_CHECK
            _consume(matcher, token_ids[start:end])
            start = end
            if time.thread_time() > ends_at:
                raise InvalidRequest(
                    f"matching the {len(token_ids)} tokens of resume against the structured output's grammar takes "
                    f"over {_MAX_RESUME_SECONDS:g} s of CPU time; make the grammar simpler"
                )


def _convert_tokenizer(model: Path) -> str:
    from transformers import AutoTokenizer  # imported late: slow, and most checkpoints have tokenizer.json

    text: str = AutoTokenizer.from_pretrained(model).backend_tokenizer.to_str()
    return text


def _consume(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
    if token_ids and not matcher.consume_tokens(list(token_ids)):
        raise InvalidRequest(
            "resume has tokens that the structured output's grammar does not allow; send the tokens that were delivered"
        )
