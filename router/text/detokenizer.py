"""Incremental detokenizers: turn token ids into text, and return text as soon as no later token can change it.

The text returned so far depends only on the tokens fed so far and not on how they were batched. So feeding the
delivered tokens restores the detokenizer of a resumed request.
"""

import codecs
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

# A character has at most four bytes. If this many tokens still end in a replacement character, it is final.
_MAX_HELD_TOKENS: Final = 8
_REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """The detokenizer of one choice."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The text held back, at the end of the tokens; an incomplete character becomes U+FFFD."""


class ByteDetokenizer:
    """For byte-level vocabularies, in which a text is the concatenation of its tokens' bytes."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer. Ids outside the vocabulary have no text."""
        pieces = self._pieces
        return self._decode(b"".join([pieces[token] for token in token_ids if token < len(pieces)]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For other vocabularies: decodes the last few tokens with and without the new one, and returns the difference.

    Skipped tokens never enter the window: the token after one would be decoded like the first of a text, whose leading
    space many decoders drop.
    """

    __slots__ = ("_context", "_decode", "_skipped", "_text", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: AbstractSet[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._context = 0  # number of tokens of the window whose text was returned
        self._text = ""  # the text of those tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._feed_one(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        return self._emit(self._decode(self._window))

    def _feed_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._context < _MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        fresh = text[len(self._text) :]
        del self._window[: self._context]
        self._context = len(self._window)
        self._text = self._decode(self._window)
        return fresh
