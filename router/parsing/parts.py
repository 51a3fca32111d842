"""What the text of a choice consists of: reasoning, content and tool calls, in the pieces that are streamed."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. `index`: the call's number within its choice, from 0. `name` and `id` are set only in the
    first piece of a call. `arguments`: JSON text, to be joined with that of the call's other pieces. `is_custom`: the
    call is of a custom tool, and `arguments` is its input."""

    index: int
    arguments: str = ""
    name: str = ""
    id: str = ""
    is_custom: bool = False


Part: TypeAlias = Reasoning | Content | ToolCallDelta


def make_call_id() -> str:
    """A new id of a tool call, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """The parts, with adjacent parts of one kind joined. Empty parts are left out."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match part, last:
            case ToolCallDelta(), ToolCallDelta() if last.index == part.index:
                arguments = last.arguments + part.arguments
                joined[-1] = ToolCallDelta(part.index, arguments, last.name, last.id, last.is_custom)
            case ToolCallDelta(), _:
                joined.append(part)
            case Content(), Content():
                joined[-1] = Content(last.text + part.text)
            case Reasoning(), Reasoning():
                joined[-1] = Reasoning(last.text + part.text)
            case _ if part.text:
                joined.append(part)
    return joined
