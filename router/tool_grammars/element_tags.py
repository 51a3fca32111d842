"""element_calls(): strict calls of MiniMax M3, in which each argument is a tag of its name; see MinimaxToolParser.

A string is written as it is, up to the next tag. A list, and an object whose schema names its properties, consists of
tags in its own tag. Any other value is JSON. Arguments come in the order of the schema. Of the constraints on strings
only `enum` and `const` are enforced.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from coatcheck.router.parsing.minimax_tool_parser import MARK, OPENINGS
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema
from coatcheck.router.tool_grammars.input_grammar import INPUT, CustomFunction, InputGrammar
from coatcheck.router.tool_grammars.properties import (
    Property,
    definitions_of,
    item_of,
    nested_properties,
    properties_of,
    refuse_deep_schemas,
    resolve_reference,
    text_choices,
)
from coatcheck.router.tool_grammars.rules import ANY_TEXT, Rules, quote

_NAMES: Final = re.compile(r"(?!/|(?:invoke|tool_call)$)[^<>\s]{1,128}")
_BREAK: Final = r"/\n?/"
_END: Final = '"</invoke>"'
# A tag in a call of a function that is not strict.
_ANY_TAG: Final = r"/<\/?[^<>]{1,128}>/ & ~/<\/?(?:invoke|tool_call)(?s:.*)/"


def element_calls(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """The body of the start rule: text with calls in it. Raises InvalidRequest for a schema that cannot be enforced."""
    invoke, *outer = OPENINGS
    rules.rule("ANY_TAG", _ANY_TAG)
    rules.text_until("any_value", MARK)
    with refuse_deep_schemas():
        calls = [_Elements(index, function, rules).call() for index, function in enumerate(functions)]
    around = [f"{ANY_TEXT} {rules.marker(marker)}" for marker in outer if rules.has_token(marker)]
    opening = rules.text_until("opening", invoke)
    piece = rules.rule("piece", " | ".join([*around, f"{opening} ({' | '.join(calls)})"]))
    return f"{piece}* {ANY_TEXT}"


class _Elements:
    """The rules for the calls of function number `index`."""

    def __init__(self, index: int, function: FunctionSchema, rules: Rules) -> None:
        self._index = index
        self._function = function
        self._rules = rules
        self._mark = rules.marker(MARK)
        self._definitions = definitions_of(function.parameters or {})
        self._elements: dict[tuple[str, int], str] = {}  # (name of a tag, id of the schema of its value) -> rule

    def call(self) -> str:
        """The rule for a call, without the trigger before it."""
        function = self._function
        properties = properties_of(function, _NAMES)
        if isinstance(function, CustomFunction) and function.input_grammar is not None:
            tag, end = quote(f"<{INPUT}>"), quote(f"</{INPUT}>")
            arguments = f"{self._mark} {tag} {self._input(function.input_grammar)} {end} {_BREAK} {self._mark}"
        elif properties is None:  # each `any_value` ends with a mark
            arguments = "(any_value ANY_TAG)* any_value"
        else:
            arguments = f"{self._in_order(properties)} {self._mark}"
        start = quote(f'"{function.name}">')
        return self._rules.rule(f"call_{self._index}", f"{start} {_BREAK} {arguments} {_END}")

    def _in_order(self, properties: Sequence[Property]) -> str:
        elements = ((self._element(one), one.is_required) for one in properties)
        return " ".join(element if is_required else f"{element}?" for element, is_required in elements)

    def _element(self, one: Property) -> str:
        """The rule for a tag with a value in it. A schema that refers to itself gets one rule."""
        schema = resolve_reference(one.schema, self._function.parameters or {})
        key = (one.name, id(schema))
        if key not in self._elements:
            rule = self._elements[key] = f"element_{self._index}_{len(self._elements)}"
            tag, end = quote(f"<{one.name}>"), quote(f"</{one.name}>")
            self._rules.rule(rule, f"{self._mark} {tag} {self._value(one, schema)} {end} {_BREAK}")
        return self._elements[key]

    def _value(self, one: Property, schema: dict[str, Any]) -> str:
        """A value and the mark of its end tag."""
        if schema.get("type") == "string":
            choices = text_choices(schema)
            texts = " | ".join(quote(text) for text in choices if text)
            if not choices:
                return "any_value"
            return f"({texts}){'?' if '' in choices else ''} {self._mark}" if texts else self._mark
        if (item := item_of(schema, self._definitions)) is not None:
            return f"{_BREAK} {self._element(item)}* {self._mark}"
        if (properties := nested_properties(schema, self._definitions, _NAMES)) is not None:
            return f"{_BREAK} {self._in_order(properties)} {self._mark}"
        return f"{self._rules.schema(one.document)} {self._mark}"

    def _input(self, grammar: InputGrammar) -> str:
        """The input of a custom tool and the mark of its end tag."""
        if terminal := grammar.text_terminal(self._rules):
            return self._rules.text_until(self._rules.new_name("input"), MARK, terminal)
        return f"{self._rules.new_rule('input', grammar.text_rule())} {self._mark}"
