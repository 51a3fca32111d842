"""strict_calls_grammar(): lets a model write any text, and calls of its tools only as their schemas say.

In the formats hermes and minimax a call stands between tags, which are text. In the others its markers are special
tokens, which no text of a grammar matches: a model whose tokenizer lacks these tokens has no such grammar.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from llguidance import StructTag

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.openai.tools import Function, make_grammar, schema_document

_TAGS: Final = {"hermes": "tool_call", "minimax": "tool_calls"}
_TEXT: Final = "/(?s:.*)/"


def strict_calls_grammar(functions: Sequence[Function], tool_format: str, special_ids: Mapping[str, int]) -> Grammar:
    """Any text in which each call is of one of `functions`, and fits its schema if it is strict. `special_ids`: the ids
    of special tokens by their text. Raises InvalidRequest for a format that no grammar enforces."""
    if tag := _TAGS.get(tool_format):
        return _tagged_calls(functions, tag)
    rules = _Rules(special_ids)
    match tool_format:
        case "mistral" if rules.has("[TOOL_CALLS]", "[ARGS]"):
            call = rules.calls(functions, '"{name}" [ARGS] {schema}')
            section = f"({rules.mark('[TOOL_CALLS]')} {call})+"
        case "mistral" if rules.has("[TOOL_CALLS]"):
            call = rules.calls(functions, '"{{\\"name\\": \\"{name}\\", \\"arguments\\": " {schema} "}}"')
            section = f'{rules.mark("[TOOL_CALLS]")} "[" {call} (", " {call})* "]"'
        case "deepseek_v3" if rules.has("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"):
            call = rules.calls(
                functions,
                '"{name}" <｜tool▁sep｜> {schema}',
                '"function" <｜tool▁sep｜> "{name}\\n```json\\n" {schema} "\\n```"',
            )
            one = f"{rules.mark('<｜tool▁call▁begin｜>')} {call} {rules.mark('<｜tool▁call▁end｜>')}"
            section = rules.between("<｜tool▁calls▁begin｜>", rf"{one} (/\n?/ {one})*", "<｜tool▁calls▁end｜>")
        case "kimi_k2" if rules.has("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"):
            call = rules.calls(functions, '"functions.{name}:" /[0-9]{{1,4}}/ <|tool_call_argument_begin|> {schema}')
            one = f"{rules.mark('<|tool_call_begin|>')} {call} {rules.mark('<|tool_call_end|>')}"
            section = rules.between("<|tool_calls_section_begin|>", f"({one})+", "<|tool_calls_section_end|>")
        case _:
            raise InvalidRequest(
                "strict tools need tool_choice 'required' or a named function with this model; set one of them, or "
                "remove strict"
            )
    return make_grammar(rules.written(f"start: {_TEXT} ({section} {_TEXT})?"))


def _tagged_calls(functions: Sequence[Function], tag: str) -> Grammar:
    tags = [
        StructTag(
            trigger=f"<{tag}>",
            begin=f'<{tag}>\n{{"name": {json.dumps(function.name)}, "arguments": ',
            grammar=schema_document(function.parameters if function.strict else None),
            end=f"}}\n</{tag}>",
        )
        for function in functions
    ]
    return make_grammar(StructTag.to_grammar(tags, assume_special=False))


class _Rules:
    """Rules in llguidance's dialect of Lark. Names of functions need no escape: see Function."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []

    def has(self, *markers: str) -> bool:
        return all(marker in self._special_ids for marker in markers)

    def mark(self, marker: str) -> str:
        """A special token in a rule."""
        return f"<[{self._special_ids[marker]}]>"

    def between(self, start: str, inner: str, end: str) -> str:
        """`inner` between two markers, if the tokenizer has these."""
        return f"{self.mark(start)} {inner} {self.mark(end)}" if self.has(start, end) else inner

    def calls(self, functions: Sequence[Function], *forms: str) -> str:
        """The name of a rule for a call in one of `forms`, which have {name}, {schema} and special tokens."""
        alternatives = []
        for index, function in enumerate(functions):
            schema = json.dumps(schema_document(function.parameters if function.strict else None))
            self._rules.append(f"schema_{index}: %json {schema}")
            for form in forms:
                made = form.format(name=function.name, schema=f"schema_{index}")
                for marker in sorted(self._special_ids, key=len, reverse=True):
                    made = made.replace(f" {marker} ", f" {self.mark(marker)} ")
                alternatives.append(made)
        self._rules.append("call: " + " | ".join(alternatives))
        return "call"

    def written(self, start: str) -> str:
        return "\n".join(["%llguidance {}", start, *self._rules]) + "\n"
