"""TokenText: single tokens as clients are shown them beside their log-probabilities.

A token need not be whole characters: its bytes are exact, its text is what can be read of them. It does not know
streams.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from ...proto.coatcheck_pb2 import TokenLogprob
from ..tokenizer import TokenizerJson
from .text_offsets import TextOffsets, prompt_offsets

# JSON has no infinities; a token that a mask forbids has this instead.
_LEAST = -9999.0


class TokenText:
    """Over one tokenizer."""

    def __init__(self, tokenizer: TokenizerJson) -> None:
        self._tokenizer = tokenizer

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

    async def prompt_offsets(self, token_ids: Sequence[int], text: str | None) -> list[int]:
        """See text_offsets.prompt_offsets; off the event loop."""
        return await asyncio.to_thread(prompt_offsets, self._tokenizer, token_ids, text)

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a chat choice."""
        content = []
        for token in logprobs:
            entry = self._entry(token.token_id, token.logprob)
            entry["top_logprobs"] = [self._entry(top.token_id, top.logprob) for top in token.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def completion(self, logprobs: Sequence[TokenLogprob | int], offsets: Sequence[int]) -> dict[str, Any]:
        """The `logprobs` of a completion's choice; `offsets` are where its tokens begin in the choice's text. An id
        without log-probability is a prompt's first token."""
        made: dict[str, list[Any]] = {
            "text_offset": list(offsets), "token_logprobs": [], "tokens": [], "top_logprobs": []
        }  # fmt: skip
        for token in logprobs:
            text = self.text(token if isinstance(token, int) else token.token_id)
            made["tokens"].append(text)
            made["token_logprobs"].append(None if isinstance(token, int) else finite(token.logprob))
            made["top_logprobs"].append(None if isinstance(token, int) else self._top(token, text))
        return made

    def prompt(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """The `prompt_logprobs` that other engines' clients ask for: by token id, nothing for the first."""
        made: list[dict[str, Any] | None] = [None]
        for token in logprobs:
            ranked = [(top.token_id, top.logprob, rank) for rank, top in enumerate(token.top, 1)]
            made.append({
                str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
                for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]
            })  # fmt: skip
        return made

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def _top(self, token: TokenLogprob, text: str) -> dict[str, float]:
        made: dict[str, float] = {}
        for top in token.top:
            made.setdefault(self.text(top.token_id), finite(top.logprob))
        made.setdefault(text, finite(token.logprob))
        return made


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return logprob if math.isfinite(logprob) else _LEAST
