"""The functions that a model may call, and the grammars that constrain its calls to their schemas.

Each schema is a JSON document of its own in the grammar, because a reference such as "#/$defs/X" or "#" is relative to
the root of its document. In a common document references would be wrong, and the "$defs" of two functions could
collide. tool_parser.py finds the calls in the generated text.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, MAX_BYTES, Grammar
from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.sampling_fields import RequestBody, schema_grammar

_ANY: Final[dict[str, Any]] = {"type": "object"}


class Function(RequestBody):
    """A function that the model may call; `parameters` is a JSON schema."""

    accepted_values: ClassVar = {"strict": (False,)}

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestBody):
    name: str


class NamedTool(RequestBody):
    """`tool_choice` that requires a call of one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedFunctions(RequestBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MAX_TOOLS, min_length=1)]


class AllowedTools(RequestBody):
    """`tool_choice` that offers only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def named_call_grammar(function: Function) -> Grammar:
    """Only the arguments of `function`."""
    return schema_grammar(function.parameters or _ANY)


def required_calls_grammar(functions: Sequence[Function], parallel: bool) -> Grammar:
    """A JSON list of calls {"name": ..., "arguments": {...}}: one or more with `parallel`, else exactly one."""
    schemas: dict[str, int] = {}  # one rule for each schema, even if several functions share it
    calls = []
    for function in functions:
        opening = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        place = schemas.setdefault(json.dumps(schema_document(function.parameters)), len(schemas))
        calls.append(f'{opening} schema_{place} "}}"')
    rules = [
        "%llguidance {}",
        'start: "[" call (", " call)* "]"' if parallel else 'start: "[" call "]"',
        "call: " + " | ".join(calls),
        *(f"schema_{place}: %json {schema}" for schema, place in schemas.items()),
    ]
    return make_grammar("\n".join(rules) + "\n")


def make_grammar(rules: str) -> Grammar:
    """A grammar of `rules`. Raises InvalidRequest if they are too long."""
    if len(rules) > MAX_BYTES:
        raise InvalidRequest(
            f"the schemas of the tools have {len(rules)} bytes as a grammar; the maximum is {MAX_BYTES}; send "
            "fewer tools or shorter schemas, or set tool_choice to auto and remove strict"
        )
    return Grammar("grammar", rules)


def schema_document(schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema as the root of a document in a grammar. The options of its "x-guidance" override JSON_STYLE."""
    own = (schema or {}).get("x-guidance")
    style = {**JSON_STYLE, **own} if isinstance(own, dict) else dict(JSON_STYLE)
    return {**(schema or _ANY), "x-guidance": style}
