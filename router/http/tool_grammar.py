"""What an answer must be so that its calls are certain to fit their functions' schemas.

It does not know how calls are found in the text again: see tool_calls.
"""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import StructTag

from ...proto.grammar import JSON_STYLE, Grammar
from .structured import schema_grammar
from .tools import Function

_ANY = {"type": "object"}


def call_of(function: Function) -> Grammar:
    """The arguments of this one function, and nothing else."""
    return schema_grammar(function.parameters or _ANY)


def some_calls(functions: Sequence[Function], parallel: bool) -> Grammar:
    """A list of one call at least; of just one where they may not be parallel."""
    made: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(each) for each in functions]}}
    if not parallel:
        made["maxItems"] = 1
    return schema_grammar(made)


def strict_calls(functions: Sequence[Function]) -> Grammar:
    """Any text; but where it opens a call in the hermes form, that call is to one of these and fits its schema."""
    tags = [
        StructTag(
            trigger="<tool_call>",
            begin=f'<tool_call>\n{{"name": {json.dumps(each.name)}, "arguments": ',
            grammar={**((each.strict and each.parameters) or _ANY), "x-guidance": dict(JSON_STYLE)},
            end="}\n</tool_call>",
        )
        for each in functions
    ]
    return Grammar("grammar", StructTag.to_grammar(tags, assume_special=False))


def _call(function: Function) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": function.parameters or _ANY},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
