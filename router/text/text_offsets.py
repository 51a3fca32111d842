"""The `text_offset` of text completions: where each token begins in the text that the client gets.

A token's offset is the number of whole characters that the tokens before it decode to. The tokens of one character all
have the character's offset. A token that is not in the text, such as a special one, has the offset of the next token.
"""

from collections.abc import Sequence
from typing import Final

from coatcheck.router.text.detokenizer import Detokenizer
from coatcheck.router.text.tokenizer import TokenizerJson

# How many special tokens are looked for on each side of a text; tokenizers add one or two.
_MAX_ADDED: Final = 8


class TextOffsets:
    """The offsets of one choice's tokens. `start`: characters before the first token."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._next = start

    def next_offsets(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._detokenizer.feed((token_id,)))
        return offsets


def prompt_offsets(tokenizer: TokenizerJson, token_ids: Sequence[int], text: str | None) -> list[int]:
    """The offsets of a prompt's tokens in its echo. Takes about a microsecond for each token.

    `text`: the prompt, if the client sent a text. It lacks the special tokens that the tokenizer adds before and after.
    If the tokenizer's normalizer changes the text, for example to lower case, offsets may be wrong, but they are never
    beyond its end. None if the client sent ids: the echo is then the decoded tokens, including special ones.
    """
    offsets = TextOffsets(tokenizer.detokenizer(skip_special_tokens=False))
    if text is None:
        return offsets.next_offsets(token_ids)
    before, after = _added(tokenizer, token_ids, text)
    end = len(token_ids) - after
    made = [0] * before + offsets.next_offsets(token_ids[before:end]) + [len(text)] * after
    return [min(offset, len(text)) for offset in made]


def _added(tokenizer: TokenizerJson, token_ids: Sequence[int], text: str) -> tuple[int, int]:
    """How many special tokens the tokenizer added before and after a text; at most _MAX_ADDED each."""
    count = len(token_ids)
    first = token_ids[:_MAX_ADDED]
    leading = next((n for n, token in enumerate(first) if not tokenizer.is_special(token)), len(first))
    written = [tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids[:leading]]
    before = next(n for n in range(leading + 1) if text.startswith("".join(written[n:])))
    last = range(min(count - before, _MAX_ADDED))
    trailing = next((n for n in last if not tokenizer.is_special(token_ids[count - 1 - n])), len(last))
    written = [tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids[count - trailing :]]
    after = next(n for n in range(trailing + 1) if text.endswith("".join(written[: trailing - n])))
    return before, after
