"""tagged_arguments(): strict calls in the formats that have a tag for each argument; see XmlToolParser.

A string is written as it is, up to the tag's end, and any other value as JSON. Arguments come in the order of the
schema. Of the constraints on strings only `enum` and `const` are enforced.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coatcheck.router.parsing.xml_tool_parser import XmlCallFormat
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema
from coatcheck.router.tool_grammars.input_grammar import CustomFunction, InputGrammar
from coatcheck.router.tool_grammars.properties import Property, properties_of, text_choices
from coatcheck.router.tool_grammars.rules import ANY_TEXT, Rules, quote

_NAMES: Final = re.compile(r'[^<>"\s]+')
_ANY_NAME: Final = r'/[^<>"\s]+/'
_BREAK: Final = r"/\n?/"
_QUOTE: Final = '"'
# The attribute of an argument with its type -> (JSON's type, the value of the attribute).
_TYPES: Final = {
    "string": (("string", "true"), ("", "false")),
    "type": (
        ("string", "string"), ("integer", "number"), ("number", "number"), ("boolean", "boolean"), ("null", "null"),
        ("array", "array"), ("object", "object"),
    ),
}  # fmt: skip


def tagged_arguments(functions: Sequence[FunctionSchema], form: XmlCallFormat, rules: Rules) -> str:
    """The body of the start rule: text with calls in it. Raises InvalidRequest for a schema that cannot be enforced."""
    tags = _Tags(form, rules)
    calls = [tags.call(index, function) for index, function in enumerate(functions)]
    opening = rules.text_until("opening", form.trigger)
    around = [f"{ANY_TEXT} {rules.marker(marker)}" for marker in form.dropped if rules.has_token(marker)]
    piece = rules.rule("piece", " | ".join([*around, f"{opening} ({' | '.join(calls)})"]))
    return f"{piece}* {ANY_TEXT}"


class _Tags:
    def __init__(self, form: XmlCallFormat, rules: Rules) -> None:
        self._form = form
        self._rules = rules
        self._any_value = rules.text_until("any_value", form.argument_end)

    def call(self, index: int, function: FunctionSchema) -> str:
        """The rule for a call of function number `index`, without the trigger before it."""
        form, rules = self._form, self._rules
        properties = properties_of(function, _NAMES)
        grammar = function.input_grammar if isinstance(function, CustomFunction) else None
        if properties is None:
            opening = self._opening(_ANY_NAME, None)
            arguments = f"({opening} {self._any_value} {_BREAK})*"
        else:
            arguments = " ".join(self._argument(one, grammar) for one in properties)
        number = ""
        if form.index_attribute:
            number = f"{quote(f'{_QUOTE} {form.index_attribute}={_QUOTE}')} /[0-9]{{1,4}}/"
        start = quote(form.call_start.removeprefix(form.trigger) + function.name)
        head = f"{start} {number} {rules.marker(form.name_end)}"
        return rules.rule(f"call_{index}", f"{head} {_BREAK} {arguments} {rules.marker(form.call_end)}")

    def _argument(self, one: Property, grammar: InputGrammar | None = None) -> str:
        """The rule for an argument. `grammar`: of its text."""
        end = self._rules.marker(self._form.argument_end)
        opening = self._opening(quote(one.name), one.schema)
        choices = text_choices(one.schema)
        space = "" if self._form.type_attribute else _BREAK  # line breaks would be a part of the string
        if grammar is not None:
            value = self._input(grammar, space)
        elif choices:
            texts = " | ".join(quote(text) for text in choices if text)
            text = f"({texts}){'?' if '' in choices else ''}" if texts else ""
            value = f"{space} {text} {space} {end}"
        elif one.schema.get("type") == "string":
            value = self._any_value
        else:
            value = f"{_BREAK} {self._rules.schema(one.document)} {_BREAK} {end}"
        return f"({opening} {value} {_BREAK}){'' if one.is_required else '?'}"

    def _input(self, grammar: InputGrammar, space: str) -> str:
        """The rule for the input of a custom tool and the tag after it. Raises InvalidRequest for a grammar with the
        text of this tag."""
        if not self._rules.has_token(self._form.argument_end):
            grammar.require_absent(self._form.argument_end)
        terminal = grammar.text_terminal(self._rules)
        if terminal:
            name = self._rules.new_name("input")
            return self._rules.text_until(name, self._form.argument_end, f"{space} {terminal} {space}")
        text = self._rules.new_rule("input", grammar.text_rule())
        return f"{space} {text} {space} {self._rules.marker(self._form.argument_end)}"

    def _opening(self, name: str, schema: Mapping[str, Any] | None) -> str:
        """What comes before a value. `name`: of the argument, as a part of a rule. `schema`: None for any value."""
        form, rules = self._form, self._rules
        value = f"{_BREAK} {rules.marker(form.value_start)}" if form.value_start else ""
        mark = ""
        if form.type_attribute:
            texts = " | ".join(map(quote, _type_names(form.type_attribute, schema)))
            mark = f"{quote(f'{_QUOTE} {form.type_attribute}={_QUOTE}')} ({texts})"
        return f"{rules.marker(form.argument_start)} {name} {mark} {rules.marker(form.key_end)} {value}"


def _type_names(attribute: str, schema: Mapping[str, Any] | None) -> list[str]:
    """What the attribute may be. A value that may be a string and something else is JSON."""
    named = dict(_TYPES[attribute])
    if schema is None:
        return sorted(set(named.values()))
    if (kind := schema.get("type")) in named:
        return [named[kind]]
    return sorted({name for kind, name in named.items() if kind != "string"})
