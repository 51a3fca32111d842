"""LogprobsFormatter: tokens and their log-probabilities in the forms of OpenAI's and vLLM's APIs.

A token may end inside of a character. Its `bytes` are exact; its text shows what can be decoded.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob
from coatcheck.router.serving.request_validation import load_tokenizer
from coatcheck.router.text.text_offsets import TextOffsets, prompt_offsets
from coatcheck.router.text.tokenizer import TokenizerJson

# Stands for -inf, which JSON does not have: the log-probability of a token that a mask forbids.
_MIN_LOGPROB = -9999.0


class LogprobsFormatter:
    """Can be pickled if the tokenizer was loaded from a directory; another process then loads the same one."""

    def __init__(self, tokenizer: TokenizerJson, *, shows_ids: bool = False) -> None:
        """`shows_ids`: tokens are written as "token_id:5", whatever their text is."""
        self._tokenizer = tokenizer
        self._shows_ids = shows_ids

    def __reduce__(self) -> "tuple[Callable[[str, bool], LogprobsFormatter], tuple[str | None, bool]]":
        return _from_directory, (self._tokenizer.directory, self._shows_ids)

    def with_ids(self) -> "LogprobsFormatter":
        """The formatter that shows ids."""
        return LogprobsFormatter(self._tokenizer, shows_ids=True)

    def token_text(self, token_id: int) -> str:
        """The token's text. Bytes that are not valid UTF-8 are written out, so that different tokens stay different."""
        if self._shows_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def offsets(self, skip_special_tokens: bool, start: int) -> TextOffsets:
        """The TextOffsets of one choice. `start`: characters before its first token."""
        return TextOffsets(self._tokenizer.detokenizer(skip_special_tokens), start)

    def prompt_offsets(self, token_ids: Sequence[int], text: str | None) -> list[int]:
        return prompt_offsets(self._tokenizer, token_ids, text)

    def chat_logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        content = []
        for token in logprobs:
            entry = self._entry(token.token_id, token.logprob)
            entry["top_logprobs"] = [self._entry(top_id, value) for top_id, value in _ranked(token)]
            content.append(entry)
        return {"content": content, "refusal": None}

    def completion_logprobs(self, logprobs: Iterable[TokenLogprob | int], offsets: Sequence[int]) -> dict[str, Any]:
        """The `logprobs` of a text completion's choice. `offsets`: where each token begins in the choice's text. A
        prompt's first token has no log-probability and is given as its id."""
        made: dict[str, list[Any]] = {
            "text_offset": list(offsets), "token_logprobs": [], "tokens": [], "top_logprobs": []
        }  # fmt: skip
        text_of = cache(self.token_text)
        for token in logprobs:
            text = text_of(token if isinstance(token, int) else token.token_id)
            made["tokens"].append(text)
            made["token_logprobs"].append(None if isinstance(token, int) else finite(token.logprob))
            made["top_logprobs"].append(None if isinstance(token, int) else _top_logprobs(token, text, text_of))
        return made

    def prompt_logprobs(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: an object by token id for each token, None for the first."""
        entries: list[dict[str, Any] | None] = [None]
        text_of = cache(self.token_text)
        for token in logprobs:
            ranked = [(top_id, value, rank) for rank, (top_id, value) in enumerate(_ranked(token), 1)]
            entries.append({
                str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(token_id)}
                for token_id, logprob, rank in [(token.token_id, token.logprob, token.rank), *ranked]
            })  # fmt: skip
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        text = self.token_text(token_id) if self._shows_ids else raw.decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def _top_logprobs(token: TokenLogprob, text: str, text_of: Callable[[int], str]) -> dict[str, float]:
    made = {text: finite(token.logprob)}  # the token itself comes first, as in vLLM
    for top_id, value in _ranked(token):
        made.setdefault(text_of(top_id), finite(value))
    return made


def _ranked(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """(token id, log-probability) of the tokens that are reported beside the token itself. If these are all tokens,
    they are in descending order of log-probability; equal ones in ascending order of id."""
    if not token.all_logprobs:
        return [(top.token_id, top.logprob) for top in token.top]
    values = np.frombuffer(token.all_logprobs, dtype="<f4")
    order = np.argsort(-values, kind="stable")
    return zip(order.tolist(), values[order].tolist(), strict=True)


def _from_directory(directory: str, shows_ids: bool) -> LogprobsFormatter:
    return LogprobsFormatter(load_tokenizer(directory), shows_ids=shows_ids)


def finite(logprob: float) -> float:
    """`logprob`, or a number that JSON can hold in place of an infinity."""
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
