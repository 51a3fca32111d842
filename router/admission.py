"""admit(): from the message a client sent to a Request, or to the error that says what to change.

Pure but for the tokeniser and the dice that it is given. It does not know groups or streams.
"""

import dataclasses
import random
import uuid
from collections.abc import Sequence
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ..proto.coatcheck_pb2 import GenerateRequest, Resumed, TokenizeRequest
from ..proto.errors import InvalidRequest, NeverFits, NotFound
from ..proto.retention import Retention
from ..proto.sampling import SamplingParams
from .conversation import chat_text
from .request import Request
from .tenant import ANYONE, Tenant
from .tokenizer import TokenizerJson

_LONGEST_NAME: Final = 256
_EMPTY = "the prompt is empty; give at least one token"


def refuse_unknown_fields(message: Message) -> None:
    """Nothing that is sent is ignored: raises InvalidRequest for a field that this contract does not have."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} has a field numbered {unknown[0].field_number} that this server does not know; "
            "leave it out"
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for part in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(part)


def check_model_name(asked: str, served: str) -> None:
    """Raises NotFound for another model than the one that is served."""
    if asked and asked != served:
        raise NotFound(f"model {asked!r} is not served here; this server has {served!r}")


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary; ids are below {vocab_size}")


def prompt_token_ids(
    message: GenerateRequest | TokenizeRequest, tokenizer: TokenizerJson, at_most: int | None = None
) -> Sequence[int]:
    """The prompt as ids; may take long for a long text. Raises InvalidRequest, early for a text far over `at_most`."""
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text and isinstance(message, GenerateRequest):
                raise InvalidRequest(_EMPTY)  # though a tokenizer that opens every text would make it one token
            special = not isinstance(message, TokenizeRequest) or _or_true(message, "add_special_tokens")
            return tokenizer.encode(message.text, special, at_most=at_most)
        case "chat":
            text = chat_text(message.chat, tokenizer.template)
            return tokenizer.encode(text, add_special_tokens=False, at_most=at_most)
        case "token_ids" if isinstance(message, GenerateRequest):
            return list(message.token_ids.ids)
        case _:
            raise InvalidRequest("there is no prompt; set text, token_ids or chat")


def admit(
    message: GenerateRequest,
    token_ids: Sequence[int],
    *,
    vocab_size: int,
    capacity: int,
    rng: random.Random,
    tenant: Tenant = ANYONE,
) -> Request:
    """Checks everything that needs no group to answer, and fills in max_tokens, seed and request id.

    `capacity` is the most tokens that any group holds for one sequence, by its model's context or by its pool.
    """
    sampling = SamplingParams.from_message(message.sampling)
    sampling.check_model(vocab_size)
    retention = Retention.from_message(message.retention) if message.HasField("retention") else None
    for name in ("request_id", "cache_salt", "session_id"):  # they are kept, logged, sent on, or hashed for each group
        if len(getattr(message, name)) > _LONGEST_NAME:
            raise InvalidRequest(
                f"{name} has {len(getattr(message, name))} characters; at most {_LONGEST_NAME} are taken"
            )
    if not token_ids:
        raise InvalidRequest(_EMPTY)
    check_token_ids(token_ids, vocab_size)
    length = len(token_ids)
    if tenant.max_prompt_tokens is not None and length > tenant.max_prompt_tokens:
        raise NeverFits(
            f"the prompt has {length} tokens, and {tenant.name!r} may send {tenant.max_prompt_tokens}; shorten it"
        )
    if length >= capacity:
        raise NeverFits(
            f"the prompt has {length} tokens; this server holds {capacity} tokens per sequence, "
            f"prompt and answer together: shorten the prompt to at most {capacity - 1}"
        )
    room = capacity - length
    if (sampling.max_tokens or 1) > room:
        raise NeverFits(
            f"the prompt has {length} tokens, which leaves room for {room} of the {sampling.max_tokens} in max_tokens; "
            f"lower max_tokens to {room} or leave it out"
        )
    if sampling.min_tokens > room:
        raise NeverFits(f"min_tokens is {sampling.min_tokens}; behind this prompt there is room for {room}")
    resume = _resumed(message.resume, sampling, sampling.max_tokens or room, vocab_size)
    # A drawn seed stays below 2^63, for clients in languages without unsigned integers.
    seed = rng.getrandbits(63) if sampling.seed is None else sampling.seed
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=token_ids,
        sampling=dataclasses.replace(sampling, max_tokens=sampling.max_tokens or room, seed=seed),
        resume=resume,
        cache_salt=tenant.salted(message.cache_salt),
        priority=tenant.ranked(message.priority),
        session_id=message.session_id,
        retention=retention,
        tenant=tenant,
    )


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
