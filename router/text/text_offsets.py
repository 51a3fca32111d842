"""The `text_offset` of completions: where each token begins in the text that a client gets.

A token's offset is the number of whole characters that the tokens before it decode to. If a character takes several
tokens, all of them have the offset of the character. A token that the text leaves out, such as a special one, has the
offset of the next token.
"""

from collections.abc import Sequence
from typing import Final

from coatcheck.router.text.detokenizer import Detokenizer
from coatcheck.router.text.tokenizer import TokenizerJson

# Most special tokens looked for on each side of a text; tokenizers add one or two.
_MOST_ADDED: Final = 8


class TextOffsets:
    """Computes the offsets of one text's tokens as they come. `start`: characters before the first token."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._next = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the text's next tokens, one for each id."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            self._next += len(self._detokenizer.feed((token_id,)))
        return offsets


def prompt_offsets(tokenizer: TokenizerJson, token_ids: Sequence[int], text: str | None) -> list[int]:
    """The offsets of a prompt's tokens in its echo; takes about a microsecond a token.

    `text`: the prompt if the client sent a text; it lacks the special tokens that the tokenizer adds before and after.
    If the tokenizer's normaliser changes the text (to lower case, say), offsets may be wrong, but never beyond its end.
    None if the client sent ids: the echo is then the decoded tokens, with special ones written out.
    """
    offsets = TextOffsets(tokenizer.detokenizer(skip_special_tokens=False))
    if text is None:
        return offsets.of(token_ids)
    before, behind = _added(tokenizer, token_ids, text)
    end = len(token_ids) - behind
    made = [0] * before + offsets.of(token_ids[before:end]) + [len(text)] * behind
    return [min(offset, len(text)) for offset in made]


def _added(tokenizer: TokenizerJson, token_ids: Sequence[int], text: str) -> tuple[int, int]:
    """The numbers of special tokens before and after a text that the tokenizer added; at most _MOST_ADDED each."""
    count = len(token_ids)
    first = token_ids[:_MOST_ADDED]
    leading = next((n for n, token in enumerate(first) if not tokenizer.is_special(token)), len(first))
    written = [tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids[:leading]]
    before = next(n for n in range(leading + 1) if text.startswith("".join(written[n:])))
    last = range(min(count - before, _MOST_ADDED))
    trailing = next((n for n in last if not tokenizer.is_special(token_ids[count - 1 - n])), len(last))
    written = [tokenizer.token_bytes(token).decode(errors="replace") for token in token_ids[count - trailing :]]
    behind = next(n for n in range(trailing + 1) if text.endswith("".join(written[: trailing - n])))
    return before, behind
