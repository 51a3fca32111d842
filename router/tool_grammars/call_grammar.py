"""The grammars that constrain calls of functions to their schemas, for answers that consist of calls only.

Each schema is a JSON document of its own in the grammar, because a reference such as "#/$defs/X" or "#" is relative to
the root of its document. In a common document references would be wrong, and the "$defs" of two functions could
collide.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, MAX_BYTES, Grammar

ANY: Final[dict[str, Any]] = {"type": "object"}


class FunctionSchema(Protocol):
    """A function that the model may call. `parameters`: a JSON schema; None for any object. `strict`: calls must fit
    the schema, also where the model may answer with text."""

    @property
    def name(self) -> str:
        """Letters, digits, dots, dashes and underscores."""

    @property
    def parameters(self) -> dict[str, Any] | None: ...

    @property
    def strict(self) -> bool | None: ...


def named_call_grammar(function: FunctionSchema, prefix: str = "") -> Grammar:
    """Only the arguments of `function`. `prefix`: rules for what an answer may have before, such as reasoning."""
    return Grammar("json_schema", json.dumps(function.parameters or ANY), prefix)


def required_calls_grammar(functions: Sequence[FunctionSchema], parallel: bool, prefix: str = "") -> Grammar:
    """A JSON list of calls {"name": ..., "arguments": {...}}: one or more with `parallel`, else exactly one. `prefix`:
    see named_call_grammar."""
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
    return make_grammar("\n".join(rules) + "\n", prefix)


def make_grammar(rules: str, prefix: str = "") -> Grammar:
    """A grammar of `rules` after those of `prefix`. Raises InvalidRequest if `rules` is too long."""
    if len(rules) > MAX_BYTES:
        raise InvalidRequest(
            f"the schemas of the tools have {len(rules)} bytes as a grammar; the maximum is {MAX_BYTES}; send "
            "fewer tools or shorter schemas, or set tool_choice to auto and remove strict"
        )
    return Grammar("grammar", rules, prefix)


def schema_document(schema: dict[str, Any] | None) -> dict[str, Any]:
    """A schema as the root of a document in a grammar. The options of its "x-guidance" override JSON_STYLE."""
    own = (schema or {}).get("x-guidance")
    style = {**JSON_STYLE, **own} if isinstance(own, dict) else dict(JSON_STYLE)
    return {**(schema or ANY), "x-guidance": style}
