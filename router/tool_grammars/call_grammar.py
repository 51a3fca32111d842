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
from coatcheck.router.tool_grammars.input_grammar import INPUT, CustomFunction
from coatcheck.router.tool_grammars.rules import Rules, quote

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


class UnenforcedParameters(InvalidRequest):
    """The parameters of a strict function have something that this model's format of calls cannot enforce. `problem`:
    what they have, in words."""

    def __init__(self, function_name: str, problem: str) -> None:
        super().__init__(function_name, problem)
        self.function_name = function_name
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"the parameters of the strict function {self.function_name!r} have {self.problem}, which this model's "
            "format of calls cannot enforce; set tool_choice to 'required' or to this function, or remove strict"
        )


def named_call_grammar(function: FunctionSchema, prefix: str = "") -> Grammar:
    """Only the arguments of `function`. `prefix`: rules for what an answer may have before, such as reasoning. Raises
    InvalidRequest for a grammar of an input that cannot be enforced."""
    if isinstance(function, CustomFunction) and function.input_grammar is not None:
        rules = Rules({})
        return make_grammar(rules.written(json_arguments(function, rules)), prefix)
    return Grammar("json_schema", json.dumps(function.parameters or ANY), prefix)


def required_calls_grammar(functions: Sequence[FunctionSchema], parallel: bool, prefix: str = "") -> Grammar:
    """A JSON list of calls {"name": ..., "arguments": {...}}: one or more with `parallel`, else exactly one. `prefix`:
    see named_call_grammar. Raises InvalidRequest as named_call_grammar does."""
    rules = Rules({})
    calls = []
    for function in functions:
        opening = quote(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        calls.append(f'{opening} {json_arguments(function, rules)} "}}"')
    call = rules.rule("call", " | ".join(calls))
    return make_grammar(rules.written(f'"[" {call} (", " {call})* "]"' if parallel else f'"[" {call} "]"'), prefix)


def json_arguments(function: FunctionSchema, rules: Rules, *, only_if_strict: bool = False) -> str:
    """The arguments of a call as a JSON object, in a rule: they fit the schema of `function`, and the grammar of its
    input if it is a custom tool. `only_if_strict`: any object will do for a function that is not strict."""
    if isinstance(function, CustomFunction) and function.input_grammar is not None:
        opening = quote(f'{{"{INPUT}": ')
        return f'{opening} {rules.new_rule("input", function.input_grammar.json_rule(rules))} "}}"'
    return rules.schema(schema_document(function.parameters if function.strict or not only_if_strict else None))


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
