"""Detokenizers: token ids in, text out as soon as it is certain, a character never split.

What has come out is a function of the tokens fed so far, not of how they were batched, so a resumed request is primed
by feeding what was delivered. A detokenizer is given pieces or a decode function; it does not know files, stop strings
or requests.
"""

import codecs
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol

# A character is at most four bytes; a longer run of replacement characters is not one in the making.
_MOST_HELD: Final = 8
_REPLACEMENT: Final = "\ufffd"


class Detokenizer(Protocol):
    """One choice's text in the making."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""

    def flush(self) -> str:
        """The last tokens have come: what was held back, however incomplete."""


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is bytes and a text their concatenation: cheap."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer; ids outside the vocabulary have no text."""
        pieces = self._pieces
        return self._decode(b"".join([pieces[token] for token in token_ids if token < len(pieces)]))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: decodes the last emitted tokens with and without the new one, and emits the difference.

    The window is a few tokens long, so a token costs two short decodes. Skipped tokens never enter it: they would make
    the token behind them look like the first of a text, whose leading space many decoders drop.
    """

    __slots__ = ("_context", "_decode", "_skipped", "_text", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: AbstractSet[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._context = 0  # how many tokens of the window have been emitted ...
        self._text = ""  # ... and their text

    def feed(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join([self._feed_one(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """See Detokenizer."""
        return self._emit(self._decode(self._window))

    def _feed_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._context < _MOST_HELD:
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        fresh = text[len(self._text) :]
        del self._window[: self._context]
        self._context = len(self._window)
        self._text = self._decode(self._window)
        return fresh
