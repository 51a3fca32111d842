"""Limits on the number of entries in a message, which bound its work on the event loop.

A chat of a few megabytes can have a hundred thousand messages, and a gRPC message of 32 MiB sixteen million. Each takes
a few microseconds to check and tens of microseconds to render, so the number is limited as well as the bytes. Pure.
"""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from coatcheck.proto.errors import InvalidRequest, NeverFits
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, TokenizeRequest

_Kind = TypeVar("_Kind", bound=Message)

# Messages in one chat. OpenAI's own API takes 2,048.
MAX_MESSAGES: Final = 8192
# Functions that a chat's model may call.
MAX_TOOLS: Final = 1024
# Entries of one message: those of all its lists and maps, at any depth, except for lists of numbers.
MAX_ENTRIES: Final = 2 * MAX_MESSAGES
# Numbers in one list, such as token ids.
MAX_NUMBERS: Final = 1 << 22
# Counting the entries of a longer message may take over 25 ms.
LONG_BYTES: Final = 16 << 10
# For a longer prompt the tokenizer holds the GIL for over 25 ms while it makes the list of ids.
_LONG_PROMPT_BYTES: Final = 128 << 10
_LONG_PROMPT_ENTRIES: Final = 512


def has_long_prompt(message: GenerateRequest | TokenizeRequest) -> bool:
    """Whether the prompt should be rendered and tokenised in a side process."""
    match message.WhichOneof("prompt"):
        case "text":
            return len(message.text) > _LONG_PROMPT_BYTES
        case "chat":
            chat = message.chat
            return len(chat.messages) + len(chat.tools) > _LONG_PROMPT_ENTRIES or chat.ByteSize() > _LONG_PROMPT_BYTES
        case _:
            return False


def check_bytes(kind: type[Message], data: bytes) -> None:
    """Parses `data` and checks the message as `check_entries` does. Runs in a side process: millions of entries take a
    second."""
    check_entries(parse_message(kind, data))


def parse_message(kind: type[_Kind], data: bytes) -> _Kind:
    """The message in `data`; raises InvalidRequest if it is not a message of type `kind`."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes are not a {kind.DESCRIPTOR.full_name}: {error}") from error


def check_entries(message: Message) -> None:
    """Raises InvalidRequest for a message with more than MAX_ENTRIES entries, more than MAX_NUMBERS numbers in one
    list, or an unknown field: no field that a client sends is ignored."""
    if message.ByteSize() > LONG_BYTES and _has_unknown_fields(message):
        raise InvalidRequest(f"{message.DESCRIPTOR.name} has unknown fields; remove them")
    _count_entries(message, MAX_ENTRIES)


def check_chat(message: GenerateRequest | TokenizeRequest, capacity: int) -> None:
    """Raises InvalidRequest for a chat of more than MAX_MESSAGES messages, and NeverFits for one of `capacity`
    messages or more. `capacity`: the most tokens of one sequence; each message takes at least one token."""
    count = len(message.chat.messages)
    if count > MAX_MESSAGES:
        raise InvalidRequest(f"the chat has {count} messages; the maximum is {MAX_MESSAGES}")
    if count >= capacity:
        raise NeverFits(
            f"the chat has {count} messages, each of at least one token; this server holds {capacity} tokens per "
            "sequence, prompt and answer together: send fewer"
        )


def _has_unknown_fields(message: Message) -> bool:
    """Whether the message or a message inside it has unknown fields. UnknownFieldSet takes ten seconds for a million
    fields."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.ByteSize() != message.ByteSize()


def _count_entries(message: Message, left: int) -> int:
    """`left` less the entries of this message. Raises InvalidRequest if that is below 0."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} has an unknown field, number {unknown[0].field_number}; remove it"
        )
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if not descriptor.is_repeated:
            left = _count_entries(value, left) if kind is not None else left
            continue
        if kind is None and descriptor.cpp_type != descriptor.CPPTYPE_STRING:
            if len(value) > MAX_NUMBERS:
                raise InvalidRequest(f"{descriptor.name} has {len(value)} entries; the maximum is {MAX_NUMBERS}")
            continue
        left -= len(value)
        if left < 0:
            raise InvalidRequest(
                f"{descriptor.name} has {len(value)} entries; a request may have {MAX_ENTRIES} entries in all its lists"
            )
        if kind is not None and not kind.GetOptions().map_entry:
            for entry in value:
                left = _count_entries(entry, left)
    return left
