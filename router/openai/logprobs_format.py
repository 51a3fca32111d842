"""TokenText: single tokens as clients are shown them beside their log-probabilities.

A token need not be whole characters: its bytes are exact, its text is what can be read of them. It does not know
streams.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob
from coatcheck.router.serving.long_prompt import load_tokenizer
from coatcheck.router.text.text_offsets import TextOffsets, prompt_offsets
from coatcheck.router.text.tokenizer import TokenizerJson

# JSON has no infinities; a token that a mask forbids has this instead.
_LEAST = -9999.0


class TokenText:
    """Over one tokenizer."""

    def __init__(self, tokenizer: TokenizerJson) -> None:
        self._tokenizer = tokenizer

    @property
    def is_picklable(self) -> bool:
        """Whether another process can load the same tokenizer: only one from a tokenizer.json."""
        return self._tokenizer.directory is not None

    def __reduce__(self) -> "tuple[Callable[[str], TokenText], tuple[str | None]]":
        return _of_directory, (self._tokenizer.directory,)

    def text(self, token_id: int) -> str:
        """Bytes that are no characters are named, so that different tokens stay different."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def offsets(self, skip_special_tokens: bool, start: int) -> TextOffsets:
        """Offsets for one choice's tokens. `start`: characters of the text before the first token."""
        return TextOffsets(self._tokenizer.detokenizer(skip_special_tokens), start)

    def prompt_offsets(self, token_ids: Sequence[int], text: str | None) -> list[int]:
        """See text_offsets.prompt_offsets."""
        return prompt_offsets(self._tokenizer, token_ids, text)

    def chat(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        content = []
        for token in logprobs:
            entry = self._entry(token.token_id, token.logprob)
            entry["top_logprobs"] = [self._entry(top.token_id, top.logprob) for top in token.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def completion(self, logprobs: Iterable[TokenLogprob | int], offsets: Sequence[int]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice; `offsets` are where its tokens begin in the choice's text. An id
        without log-probability is a prompt's first token."""
        made: dict[str, list[Any]] = {
            "text_offset": list(offsets), "token_logprobs": [], "tokens": [], "top_logprobs": []
        }  # fmt: skip
        text_of = cache(self.text)
        for token in logprobs:
            text = text_of(token if isinstance(token, int) else token.token_id)
            made["tokens"].append(text)
            made["token_logprobs"].append(None if isinstance(token, int) else finite(token.logprob))
            made["top_logprobs"].append(None if isinstance(token, int) else _top(token, text, text_of))
        return made

    def prompt(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any] | None]:
        """The `prompt_logprobs` that other engines' clients ask for: by token id, nothing for the first."""
        made: list[dict[str, Any] | None] = [None]
        text_of = cache(self.text)
        for token in logprobs:
            ranked = [(top.token_id, top.logprob, rank) for rank, top in enumerate(token.top, 1)]
            made.append({
                str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(token_id)}
                for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]
            })  # fmt: skip
        return made

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


def _top(token: TokenLogprob, text: str, text_of: Callable[[int], str]) -> dict[str, float]:
    made: dict[str, float] = {}
    for top in token.top:
        made.setdefault(text_of(top.token_id), finite(top.logprob))
    made.setdefault(text, finite(token.logprob))
    return made


def _of_directory(directory: str) -> TokenText:
    return TokenText(load_tokenizer(directory))


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return logprob if math.isfinite(logprob) else _LEAST
