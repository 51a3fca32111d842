"""The functions that a chat's model may call, and the grammars that constrain its calls to their schemas.

Each schema is a JSON document of its own in the grammar. A reference such as "#/$defs/X" or "#" is relative to the
root of its document. Inside another schema it would point elsewhere, and the "$defs" of two functions could collide.
tool_parser.py parses the calls out of the text.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from llguidance import StructTag
from pydantic import Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, MAX_BYTES, Grammar
from coatcheck.router.openai.response_format import schema_grammar
from coatcheck.router.openai.sampling_fields import Body

_ANY: Final[dict[str, Any]] = {"type": "object"}


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    neutral: ClassVar = {"strict": (False,)}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Functions are the only tools."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """By its name."""

    name: str


class NamedTool(Body):
    """tool_choice when one function must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


def call_of(function: Function) -> Grammar:
    """The arguments of this one function, and nothing else."""
    return schema_grammar(function.parameters or _ANY)


def some_calls(functions: Sequence[Function], parallel: bool) -> Grammar:
    """A JSON list of one or more calls, {"name": ..., "arguments": {...}} each; of exactly one without `parallel`."""
    schemas: dict[str, int] = {}  # one rule for each, however many functions have it
    calls = []
    for function in functions:
        opening = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        place = schemas.setdefault(json.dumps(_document(function.parameters)), len(schemas))
        calls.append(f'{opening} schema_{place} "}}"')
    rules = [
        "%llguidance {}",
        'start: "[" call (", " call)* "]"' if parallel else 'start: "[" call "]"',
        "call: " + " | ".join(calls),
        *(f"schema_{place}: %json {schema}" for schema, place in schemas.items()),
    ]
    return _grammar("\n".join(rules) + "\n")


def strict_calls(functions: Sequence[Function]) -> Grammar:
    """Any text; but where it opens a call in the hermes form, that call is to one of these and fits its schema."""
    tags = [
        StructTag(
            trigger="<tool_call>",
            begin=f'<tool_call>\n{{"name": {json.dumps(each.name)}, "arguments": ',
            grammar=_document(each.parameters if each.strict else None),
            end="}\n</tool_call>",
        )
        for each in functions
    ]
    return _grammar(StructTag.to_grammar(tags, assume_special=False))


def _grammar(rules: str) -> Grammar:
    if len(rules) > MAX_BYTES:
        raise InvalidRequest(
            f"the schemas of the tools have {len(rules)} bytes as a grammar, where {MAX_BYTES} are the most; send "
            "fewer tools or shorter schemas, or set tool_choice to auto and leave strict out"
        )
    return Grammar("grammar", rules)


def _document(schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema as a document root in a grammar. Our JSON style holds where the schema's "x-guidance" does not
    differ."""
    own = (schema or {}).get("x-guidance")
    style = {**JSON_STYLE, **own} if isinstance(own, dict) else dict(JSON_STYLE)
    return {**(schema or _ANY), "x-guidance": style}
