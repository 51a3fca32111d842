"""validate_request(): turns a client's message into a Request, or raises the error that says what to change.

`prompt_token_ids` tokenises the prompt before. `encode_long_prompt` does so in a side process. The tokenizers package
releases the GIL while it computes, but holds it while it makes the list of ids and frees its result: in a thread of the
router, a million tokens would stop every stream for 0.2 s.
"""

import dataclasses
import random
import uuid
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Final

from google.protobuf.message import Message

from coatcheck.proto.errors import ContextLengthExceeded, InvalidParameter, InvalidRequest, NeverFits, NotFound
from coatcheck.proto.generation_config import NO_DEFAULTS, SamplingDefaults
from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, Pooling, Resumed, TokenizeRequest
from coatcheck.router.access.resume_tickets import digest_request
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.event_loop.message_limits import check_entries
from coatcheck.router.groups.request import Request
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.parsing.reasoning_parser import ReasoningStart
from coatcheck.router.serving.logprob_limits import check_answer_size, check_logprobs
from coatcheck.router.serving.tool_choice import reasoning_start_of_chat
from coatcheck.router.text.chat_template import render_chat
from coatcheck.router.text.tokenizer import TokenizerJson

_LONGEST_NAME: Final = 256
_SLICE: Final = 16384  # token ids
_EMPTY = "the prompt is empty; give at least one token"

load_tokenizer = cache(TokenizerJson.load)  # in a side process, which serves one model


def check_model_name(requested: str, served: Sequence[str]) -> None:
    """Raises NotFound if a request names a model that is not served here. "" is the model itself."""
    if requested and requested not in served:
        names = ", ".join(map(repr, served))
        raise NotFound(f"The model {requested[:_LONGEST_NAME]!r} does not exist; this server has {names}")


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary; ids are below {vocab_size}")


def prompt_token_ids(
    message: GenerateRequest | TokenizeRequest, tokenizer: TokenizerJson, at_most: int | None = None
) -> Sequence[int]:
    """Tokenises the prompt of a message; takes long for a long prompt.

    Raises InvalidRequest, and NeverFits for a text far over `at_most` tokens before all of it is tokenised.
    """
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text and isinstance(message, GenerateRequest):
                raise InvalidRequest(_EMPTY)  # some tokenizers would add a token at the beginning
            special = not isinstance(message, TokenizeRequest) or _or_true(message, "add_special_tokens")
            return tokenizer.encode(message.text, special, at_most=at_most)
        case "chat":
            text = render_chat(message.chat, tokenizer.template)
            return tokenizer.encode(text, add_special_tokens=False, at_most=at_most)
        case "token_ids" if isinstance(message, GenerateRequest):
            return _copy_ids(message.token_ids.ids, at_most)
        case _:
            raise InvalidRequest("there is no prompt; set text, token_ids or chat")


def encode_long_prompt(
    directory: str, kind: type[GenerateRequest] | type[TokenizeRequest], message: bytes, at_most: int
) -> "array[int]":
    """The token ids of the prompt in a serialised message of type `kind`. `directory` contains the tokenizer. Raises as
    prompt_token_ids does."""
    return array("I", prompt_token_ids(kind.FromString(message), load_tokenizer(directory), at_most))


def check_and_digest(message: GenerateRequest) -> bytes:
    """Checks the message as `check_entries` does, and returns its `digest_request`."""
    check_entries(message)
    return digest_request(message)


def validate_request(
    message: GenerateRequest,
    token_ids: Sequence[int],
    *,
    vocab_size: int,
    capacity: int,
    rng: random.Random,
    tenant: Tenant = ANONYMOUS,
    defaults: SamplingDefaults = NO_DEFAULTS,
    deadline: float | None = None,
    max_logprobs: int = MAX_LOGPROBS,
    adapter: str = "",
    digest: bytes = b"",
) -> Request:
    """Checks the request, and fills in the model's sampling defaults, max_tokens, seed and request id.

    `capacity`: max tokens of one sequence on any group, limited by the model's context or the KV pool. `adapter`: the
    LoRA adapter that the request names; "" for none. `digest`: see Request. All sampling values are fixed here, so a
    group that continues the request after a failover draws the same tokens.
    """
    sampling = SamplingParams.from_message(message.sampling, defaults.sampling())
    sampling.check_model(vocab_size)
    check_logprobs(sampling, vocab_size, max_logprobs)
    retention = Retention.from_message(message.retention) if message.HasField("retention") else None
    for name in ("request_id", "cache_salt", "session_id"):  # these are kept, logged, sent on, or hashed for each group
        if len(getattr(message, name)) > _LONGEST_NAME:
            raise InvalidRequest(f"{name} has {len(getattr(message, name))} characters; the maximum is {_LONGEST_NAME}")
    if message.pooling not in Pooling.values():
        raise InvalidParameter("pooling", f"is {message.pooling}; it must be POOLING_LAST or POOLING_MEAN")
    # The only token of an embedding request is never computed, so it needs no KV.
    needs_room = not (message.pooling and sampling.max_tokens == 1)
    _check_prompt_length(len(token_ids), capacity - needs_room, capacity, tenant)
    check_token_ids(token_ids, vocab_size)
    max_tokens = _choose_max_tokens(sampling, len(token_ids), capacity, defaults)
    check_answer_size(sampling, len(token_ids), max_tokens, vocab_size)
    resume = _resumed(message.resume, sampling, max_tokens, vocab_size)
    # A drawn seed stays below 2^63, for clients in languages without unsigned integers.
    seed = rng.getrandbits(63) if sampling.seed is None else sampling.seed
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=token_ids,
        sampling=dataclasses.replace(sampling, max_tokens=max_tokens, seed=seed),
        resume=resume,
        cache_salt=tenant.combine_salt(message.cache_salt),
        priority=tenant.effective_priority(message.priority),
        session_id=message.session_id,
        retention=retention,
        tenant=tenant,
        pooling=message.pooling,
        deadline=deadline,
        adapter=adapter,
        digest=digest,
    )


def _check_prompt_length(length: int, most: int, capacity: int, tenant: Tenant) -> None:
    """Raises InvalidRequest for an empty prompt, NeverFits above the tenant's limit, and ContextLengthExceeded for a
    prompt of more than `most` tokens."""
    if not length:
        raise InvalidRequest(_EMPTY)
    if tenant.max_prompt_tokens is not None and length > tenant.max_prompt_tokens:
        raise NeverFits(
            f"the prompt has {length} tokens, and {tenant.name!r} may send {tenant.max_prompt_tokens}; shorten it"
        )
    if length > most:
        raise ContextLengthExceeded.for_limit(
            capacity, f"the prompt has {length}. Shorten it to at most {most} tokens", length
        )


def _choose_max_tokens(sampling: SamplingParams, length: int, capacity: int, defaults: SamplingDefaults) -> int:
    """The max_tokens of the request, else the model's, else what fits after a prompt of `length` tokens. Raises
    ContextLengthExceeded if max_tokens or min_tokens do not fit."""
    room = max(capacity - length, 1)
    for name, asked in (("max_tokens", sampling.max_tokens or 1), ("min_tokens", sampling.min_tokens)):
        if asked > room:
            raise ContextLengthExceeded.for_limit(
                capacity,
                f"the prompt has {length} and {name} is {asked}. Lower {name} to {room}, or shorten the prompt",
                length,
                asked,
            )
    if sampling.max_tokens:
        return sampling.max_tokens
    if defaults.max_new_tokens is not None:
        return min(room, max(defaults.max_new_tokens, sampling.min_tokens))
    return room


def encode_constraints(
    sampling: SamplingParams, message: GenerateRequest, tokenizer: TokenizerJson, planner: OutputPlanner
) -> SamplingParams:
    """`sampling` with what groups obey: the token ids of bad_words, and the limit on reasoning in tokens of the model's
    markers. Raises InvalidRequest."""
    bad = {tuple(tokenizer.encode(text, add_special_tokens=False)): None for text in _spaced(sampling.bad_words)}
    bad.pop((), None)
    longest = max(map(len, bad), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise InvalidParameter("bad_words", f"has a text of {longest} tokens; the maximum is {MAX_BAD_WORD_TOKENS}")
    limit = sampling.reasoning_limit
    if limit is None and sampling.max_reasoning_tokens is not None:
        limit = planner.reasoning_limit(sampling.max_reasoning_tokens, _reasoning_start(message, planner))
    return dataclasses.replace(sampling, bad_token_ids=(*sampling.bad_token_ids, *bad), reasoning_limit=limit)


def _spaced(words: Sequence[str]) -> list[str]:
    """Each word without a space before it, and with one."""
    return [form for word in words for form in (word.lstrip(), " " + word.lstrip())]


def _reasoning_start(message: GenerateRequest, planner: OutputPlanner) -> ReasoningStart:
    """Whether the prompt ends inside of reasoning."""
    match message.WhichOneof("prompt"):
        case "chat":
            return reasoning_start_of_chat(message.chat, planner)
        case "text":
            return planner.reasoning_start_of_text(message.text)
        case _:
            return ReasoningStart.UNDECIDED


def _copy_ids(ids: Sequence[int], at_most: int | None) -> Sequence[int]:
    """A copy of `ids`: a list, or an array if there are more than _SLICE. The array is made in slices, because a single
    call would hold the GIL for 40 ms per million ids. More ids than `at_most` are returned as they are:
    `validate_request` refuses them."""
    if len(ids) <= _SLICE:
        return list(ids)
    if at_most is not None and len(ids) > at_most:
        return ids
    copied = array("I")
    for start in range(0, len(ids), _SLICE):
        copied.extend(ids[start : start + _SLICE])
    return copied


def _resumed(
    resume: Sequence[Resumed], sampling: SamplingParams, max_tokens: int, vocab_size: int
) -> dict[int, list[int]]:
    if resume and sampling.seed is None:
        raise InvalidRequest("a resumed request needs its seed; set sampling.seed to the one in Started")
    delivered: dict[int, list[int]] = {}
    for part in resume:
        if part.choice >= sampling.n:
            raise InvalidRequest(f"resume names choice {part.choice}; with n = {sampling.n} choices are below that")
        if part.choice in delivered:
            raise InvalidRequest(f"resume names choice {part.choice} twice; give all its token ids at once")
        check_token_ids(part.token_ids, vocab_size)
        if len(part.token_ids) > max_tokens:
            raise InvalidRequest(
                f"resume holds {len(part.token_ids)} tokens of choice {part.choice}, more than max_tokens "
                f"({max_tokens}); send the first request's own max_tokens"
            )
        delivered[part.choice] = list(part.token_ids)
    return delivered


def _or_true(message: Message, name: str) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else True
