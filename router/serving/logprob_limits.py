"""Limits of log-probabilities: how many a request may ask for, and how many a router returns at once.

An answer is *wide* if it has more than MAX_LOGPROBS log-probabilities at a position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from coatcheck.proto.errors import InvalidParameter, NeverFits, Overloaded
from coatcheck.proto.sampling import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import TokenLogprob
from coatcheck.router.groups.request import Request

# Max log-probabilities of prompt tokens in one answer; more take seconds to encode.
MAX_PROMPT_LOGPROBS: Final = 1 << 20
# Max memory of wide answers, in units of 4 bytes: of one request, and of all open requests together. The second is half
# of what a group lets a router leave unread.
_MAX_WIDE: Final = 1 << 22
_MAX_OPEN: Final = 1 << 23


def check_logprobs(sampling: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raises InvalidParameter if `sampling` asks for more log-probabilities at a position than `max_logprobs`, where -1
    is no limit, or than the vocabulary has."""
    limit = vocab_size if max_logprobs == ALL_LOGPROBS else min(max_logprobs, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is None or 0 <= count <= limit or (count == ALL_LOGPROBS and limit == vocab_size):
            continue
        allowed = f"from 0 to {limit}" if limit < vocab_size else f"from 0 to {limit}, or -1 for all tokens"
        raise InvalidParameter(name, f"is {count}; on this server (--max-logprobs {max_logprobs}) it must be {allowed}")


def check_answer_size(sampling: SamplingParams, prompt_length: int, max_tokens: int, vocab_size: int) -> None:
    """Raises NeverFits if the answer could have more log-probabilities than the router and the group may hold."""
    prompt = prompt_length * num_values(sampling.prompt_logprobs, vocab_size)
    most = _MAX_WIDE // _weight(sampling.prompt_logprobs) if _is_wide(sampling.prompt_logprobs) else MAX_PROMPT_LOGPROBS
    if prompt > most:
        raise NeverFits(
            f"prompt_logprobs is {sampling.prompt_logprobs} and the prompt has {prompt_length} tokens, which makes "
            f"{prompt} log-probabilities; at most {most} are returned: ask for fewer, or shorten the prompt"
        )
    if wide_weight(sampling, prompt_length, max_tokens, vocab_size) > _MAX_WIDE:
        positions = sampling.n * max_tokens
        each = num_values(sampling.logprobs, vocab_size)
        raise NeverFits(
            f"logprobs is {sampling.logprobs}, and {positions} tokens may be generated, which makes "
            f"{positions * each} log-probabilities; at most {_MAX_WIDE // _weight(sampling.logprobs)} are returned, "
            "with the prompt's: lower n or max_tokens, or name the tokens that you need in logprob_token_ids"
        )


def wide_weight(sampling: SamplingParams, prompt_length: int, max_tokens: int, vocab_size: int) -> int:
    """Max memory of the wide parts of an answer (its prompt, its output), in units of 4 bytes. 0 if neither is wide."""
    total = 0
    if _is_wide(sampling.prompt_logprobs):
        total += prompt_length * num_values(sampling.prompt_logprobs, vocab_size) * _weight(sampling.prompt_logprobs)
    if _is_wide(sampling.logprobs) and not sampling.logprob_token_ids:
        each = num_values(sampling.logprobs, vocab_size) * _weight(sampling.logprobs)
        total += sampling.n * max_tokens * each
    return total


class WideAnswers:
    """The memory of a router's open wide answers. They may wait unread in the router, and in the groups' outboxes. A
    group disconnects a router that leaves too much unread there."""

    def __init__(self) -> None:
        self._open = 0

    @contextmanager
    def reserve(self, request: Request, vocab_size: int) -> Iterator[None]:
        """Holds room for the answer. Raises Overloaded if the open answers leave too little."""
        sampling = request.sampling
        weight = wide_weight(sampling, len(request.prompt_token_ids), sampling.max_tokens or 1, vocab_size)
        if weight and self._open + weight > _MAX_OPEN:
            raise Overloaded("too many log-probabilities are being returned to other requests; try again shortly")
        self._open += weight
        try:
            yield
        finally:
            self._open -= weight


def num_values(count: int | None, vocab_size: int) -> int:
    """Number of log-probabilities at a position if `count` are asked for: the token's own is added. 0 for None."""
    if count is None:
        return 0
    return 1 + (vocab_size if count == ALL_LOGPROBS else count)


def count_values(logprobs: Sequence[TokenLogprob]) -> int:
    """About how many log-probabilities `logprobs` have together: the first entry stands for all."""
    if not logprobs:
        return 0
    return len(logprobs) * (1 + len(logprobs[0].top) + len(logprobs[0].all_logprobs) // 4)


def _weight(count: int | None) -> int:
    """Units of 4 bytes of one log-probability: a float, or one with its token id."""
    return 1 if count == ALL_LOGPROBS else 3


def _is_wide(count: int | None) -> bool:
    return count is not None and not 0 <= count <= MAX_LOGPROBS
