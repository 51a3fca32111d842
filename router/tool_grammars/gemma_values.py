"""gemma_calls(): strict calls of Gemma 4, whose strings are between markers in place of quotation marks; see
GemmaToolParser.

The names of arguments have no quotation marks. They come in alphabetical order, as in the chat template. Of
the constraints on strings only `enum` and `const` are enforced.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from coatcheck.router.parsing.gemma_tool_parser import END, QUOTE, START
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema, UnenforcedParameters
from coatcheck.router.tool_grammars.input_grammar import INPUT, CustomFunction
from coatcheck.router.tool_grammars.properties import (
    NOTES,
    Property,
    definitions_of,
    nested_properties,
    properties_of,
    refuse_deep_schemas,
    resolve_reference,
)
from coatcheck.router.tool_grammars.rules import ANY_TEXT, Rules, quote

_NAMES: Final = re.compile(r'[^<>{}\[\],:"\s]{1,128}')
_SCALARS: Final = ("integer", "number", "boolean", "null")
_ARRAY_KEYS: Final = {"type", "items", "minItems", "maxItems", *NOTES}
_OBJECT_KEYS: Final = {"type", "properties", "required", "additionalProperties", *NOTES}
# A value without a schema. `any_text` is a text up to and with the marker after it.
_ANY_RULES: Final = {
    "ANY_BARE": r"/-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/",
    "ANY_KEY": r"/[^<>{}\[\],:\x22\s]{1,128}/",
    "any_pairs": '(ANY_KEY ":" any_value ("," ANY_KEY ":" any_value)*)?',
    "any_value": 'any_string | ANY_BARE | "[" (any_value ("," any_value)*)? "]" | "{" any_pairs "}"',
}


def gemma_calls(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """The body of the start rule: text with calls in it. Raises UnenforcedParameters."""
    rules.rule("any_string", f"{rules.marker(QUOTE)} {rules.text_until('any_text', QUOTE)}")
    for name, body in _ANY_RULES.items():
        rules.rule(name, body)
    with refuse_deep_schemas():
        calls = [_Values(index, function, rules).call() for index, function in enumerate(functions)]
    opening = rules.text_until("opening", START)
    piece = rules.rule("piece", f'{opening} "call:" ({" | ".join(calls)}) "}}" {rules.marker(END)}')
    return f"{piece}* {ANY_TEXT}"


class _Values:
    """The rules for the values in the calls of function number `index`."""

    def __init__(self, index: int, function: FunctionSchema, rules: Rules) -> None:
        self._index = index
        self._function = function
        self._rules = rules
        self._parameters = function.parameters or {}
        self._definitions = definitions_of(self._parameters)
        self._values: dict[int, str] = {}  # id of a schema -> the rule for its values

    def call(self) -> str:
        """The rule for a call from the function's name up to its last argument."""
        function = self._function
        properties = properties_of(function, _NAMES)
        if isinstance(function, CustomFunction) and function.input_grammar is not None:
            arguments = f"{quote(f'{INPUT}:')} {self._input(function)}"
        elif properties is None:
            arguments = "any_pairs"
        else:
            arguments = self._pairs(properties, str(self._index))
        start = quote(f"{function.name}{{")
        return self._rules.rule(f"call_{self._index}", f"{start} {arguments}")

    def _input(self, function: CustomFunction) -> str:
        """The input of a custom tool between the markers."""
        assert function.input_grammar is not None
        start = self._rules.marker(QUOTE)
        if terminal := function.input_grammar.text_terminal(self._rules):
            return f"{start} {self._rules.text_until(self._rules.new_name('input'), QUOTE, terminal)}"
        text = self._rules.new_rule("input", function.input_grammar.text_rule())
        return f"{start} {text} {self._rules.marker(QUOTE)}"

    def _pairs(self, properties: Sequence[Property], name: str) -> str:
        """The arguments of a call, or the pairs of an object. `name`: for the names of rules."""
        ordered = sorted(properties, key=lambda one: one.name.lower())
        pairs = [(f"{quote(f'{one.name}:')} {self._value(one.schema)}", one.is_required) for one in ordered]
        return self._rules.listed(name, pairs, '","')

    def _value(self, given: object) -> str:
        """The rule for a value. A schema that refers to itself gets one rule."""
        if not isinstance(given, dict):
            if given is True:
                return "any_value"
            raise UnenforcedParameters(self._function.name, "a part that is no schema")
        schema = resolve_reference(given, self._parameters)
        if id(schema) not in self._values:
            name = self._values[id(schema)] = f"value_{self._index}_{len(self._values)}"
            self._rules.rule(name, self._body(schema, name))
        return self._values[id(schema)]

    def _body(self, schema: dict[str, Any], name: str) -> str:
        """The body of the rule `name` for the values of a schema."""
        for keyword in ("anyOf", "oneOf"):
            if (parts := schema.get(keyword)) and isinstance(parts, list) and not schema.keys() - {keyword, *NOTES}:
                return " | ".join(map(self._value, parts))
        if "const" in schema:
            return self._literal(schema["const"])
        if (choices := schema.get("enum")) and isinstance(choices, list):
            return " | ".join(map(self._literal, choices))
        kind = schema.get("type")
        if kind and isinstance(kind, list) and all(isinstance(one, str) for one in kind):
            kinds = dict.fromkeys(kind)  # each once
            bodies = [self._body({**schema, "type": one}, f"{name}_{place}") for place, one in enumerate(kinds)]
            return " | ".join(f"({body})" for body in bodies)
        if not isinstance(kind, str | None):
            raise UnenforcedParameters(self._function.name, "a type that is neither a name nor a list of names")
        if kind == "string":
            return "any_string"
        if kind in _SCALARS:
            return self._rules.schema(Property(name, schema, self._definitions, is_required=True).document)
        if kind == "array" and not schema.keys() - _ARRAY_KEYS:
            return self._array(schema)
        if kind == "object" and not schema.keys() - _OBJECT_KEYS:
            return self._object(schema, name)
        if not schema.keys() - set(NOTES):
            return "any_value"
        others = sorted(schema.keys() - {"type", *NOTES})
        raise UnenforcedParameters(
            self._function.name, f"{others[0]!r} in a part of type {kind!r}" if others else f"the type {kind!r}"
        )

    def _array(self, schema: dict[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _is_count(least) or not (most is None or _is_count(most)):
            raise UnenforcedParameters(self._function.name, "a number of items that is no integer of at least 0")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' + ("" if least else ' | "[" "]"')

    def _object(self, schema: dict[str, Any], name: str) -> str:
        others = schema.get("additionalProperties", True)
        if "properties" in schema:
            properties = nested_properties(schema, self._definitions, _NAMES)
            if properties is None:
                raise UnenforcedParameters(self._function.name, "wrong names, 'properties' or 'required' in an object")
            pairs = self._pairs(properties, name)
        elif others is False:
            pairs = ""
        else:
            one = f'ANY_KEY ":" {self._value(others)}'
            pairs = f'({one} ("," {one})*)?'
        return f'"{{" {pairs} "}}"'

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._rules.marker(QUOTE)} {quote(value)} {self._rules.marker(QUOTE)}"
        if isinstance(value, dict | list):
            raise UnenforcedParameters(self._function.name, "an object or a list in an enum")
        return quote(json.dumps(value))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
