"""Grammars: compiled grammars over one model's vocabulary, and matchers that follow a sequence along one.

Compiling takes a millisecond or so and is done once per grammar: later sequences copy what was compiled. Every rank
has its own and feeds it the same tokens, so all make the same masks. It does not know slots, steps or devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..proto.errors import InvalidRequest
from ..proto.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT: Final = 256


class Grammars:
    """Of one rank. `missing` says why there are none: then every grammar is refused, with it."""

    def __init__(self, tokenizer: LLTokenizer | None, missing: str = "") -> None:
        self._tokenizer = tokenizer
        self._missing = missing
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @classmethod
    def load(cls, model: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
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

    def matcher(self, grammar: Grammar, said: Sequence[int] = ()) -> LLMatcher:
        """One that stands behind the tokens `said`; raises InvalidRequest where there can be none."""
        if self._tokenizer is None:
            raise InvalidRequest(f"{self._missing}; leave structured output out")
        compiled = self._compiled.get(grammar)
        if compiled is None:
            from llguidance import LLMatcher

            compiled = LLMatcher(self._tokenizer, grammar.compiled(), log_level=0)
            if compiled.is_error():
                raise grammar.refused(compiled.get_error())
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        matcher = compiled.deep_copy()
        if said and not matcher.consume_tokens(list(said)):
            raise InvalidRequest("resume holds tokens that the structured output cannot have; send those delivered")
        return matcher


def _converted(model: Path) -> str:
    from transformers import AutoTokenizer  # imported late: it takes a while, and most checkpoints need none of it

    text: str = AutoTokenizer.from_pretrained(model).backend_tokenizer.to_str()
    return text
