"""strict_calls_grammar(): allows any text, and calls of strict tools only if they fit their schemas.

In the formats hermes and minimax a call is between tags, which are text. In mistral, deepseek_v3 and kimi_k2 the
markers of a call are special tokens; if the tokenizer lacks them, strict tools are refused. In llama3_json and pythonic
a text that begins like a call must be a call. argument_tags.py and element_tags.py have the formats with a tag for each
argument, and gemma_values.py has Gemma 4's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.parsing.output_format import JSON_MARKERS, TOOL_FORMATS
from coatcheck.router.parsing.pythonic_tool_parser import MARKERS as PYTHON_MARKERS
from coatcheck.router.parsing.xml_tool_parser import XmlCallFormat
from coatcheck.router.tool_grammars.argument_tags import tagged_arguments
from coatcheck.router.tool_grammars.call_grammar import FunctionSchema, json_arguments, make_grammar
from coatcheck.router.tool_grammars.element_tags import element_calls
from coatcheck.router.tool_grammars.gemma_values import gemma_calls
from coatcheck.router.tool_grammars.input_grammar import CustomFunction
from coatcheck.router.tool_grammars.keyword_arguments import keyword_arguments
from coatcheck.router.tool_grammars.rules import ANY_TEXT, Rules, quote

# By format: (what begins a call, what follows before the call's object, what ends the call).
_TAGS: Final = {
    "hermes": (
        ("<tool_call>", "\n", "\n</tool_call>"),
        ("<longcat_tool_call>", "\n", "\n</longcat_tool_call>"),
        ("<TOOLCALL>", "[", "]</TOOLCALL>"),
    ),
    "minimax": (("<tool_calls>", "\n", "\n</tool_calls>"),),
}
_BREAK: Final = r"/\n?/"
_HARMONY: Final = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")


def strict_calls_grammar(
    functions: Sequence[FunctionSchema], tool_format: str, special_ids: Mapping[str, int], prefix: str = ""
) -> Grammar:
    """Any text in which each call is of one of `functions`, and fits its schema if it is strict. `special_ids`: the ids
    of special tokens by their text. `prefix`: rules for what an answer may have before, such as reasoning. Raises
    InvalidRequest for a format, or a schema in it, that no grammar enforces."""
    rules = Rules(special_ids)
    if tool_format in _TAGS:
        return make_grammar(rules.written(_tagged_calls(functions, tool_format, rules)), prefix)
    if isinstance(form := TOOL_FORMATS[tool_format], XmlCallFormat):
        return make_grammar(rules.written(tagged_arguments(functions, form, rules)), prefix)
    match tool_format:
        case "llama3_json":
            return make_grammar(rules.written(_json_texts(functions, rules)), prefix)
        case "minimax_m3":
            return make_grammar(rules.written(element_calls(functions, rules)), prefix)
        case "gemma4":
            return make_grammar(rules.written(gemma_calls(functions, rules)), prefix)
        case "pythonic":
            return make_grammar(rules.written(_python_list(functions, rules)), prefix)
        case "openai" if rules.has(*_HARMONY):
            return make_grammar(rules.written(_harmony_messages(functions, rules)))  # reasoning is a message too
        case "mistral" if rules.has("[TOOL_CALLS]", "[ARGS]"):
            call = _calls(rules, functions, lambda name, schema: f'"{name}" {rules.marker("[ARGS]")} {schema}')
            section = f"({rules.marker('[TOOL_CALLS]')} {call})+"
        case "mistral" if rules.has("[TOOL_CALLS]"):
            call = _calls(rules, functions, _object("arguments"))
            section = f'{rules.marker("[TOOL_CALLS]")} "[" {call} (", " {call})* "]"'
        case "deepseek_v3" if rules.has("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"):
            separator = rules.marker("<｜tool▁sep｜>")
            call = _calls(
                rules,
                functions,
                lambda name, schema: f'"{name}" {separator} {schema}',
                lambda name, schema: f'"function" {separator} "{name}\\n```json\\n" {schema} "\\n```"',
            )
            one = f"{rules.marker('<｜tool▁call▁begin｜>')} {call} {rules.marker('<｜tool▁call▁end｜>')}"
            section = rules.between("<｜tool▁calls▁begin｜>", rf"{one} (/\n?/ {one})*", "<｜tool▁calls▁end｜>")
        case "kimi_k2" if rules.has("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"):
            begin = rules.marker("<|tool_call_argument_begin|>")
            call = _calls(rules, functions, lambda name, schema: f'"functions.{name}:" /[0-9]{{1,4}}/ {begin} {schema}')
            one = f"{rules.marker('<|tool_call_begin|>')} {call} {rules.marker('<|tool_call_end|>')}"
            section = rules.between("<|tool_calls_section_begin|>", f"({one})+", "<|tool_calls_section_end|>")
        case "apertus" if rules.has("<|tools_prefix|>", "<|tools_suffix|>"):
            call = _calls(rules, functions, lambda name, schema: f'"{{\\"{name}\\": " {schema} "}}"')
            calls = f'"[" {call} (", " {call})* "]"'
            section = rules.between("<|tools_prefix|>", calls, "<|tools_suffix|>")
        case "solar_open":
            return make_grammar(rules.written(_solar_calls(functions, rules)), prefix)
        case _:
            if any(isinstance(function, CustomFunction) and function.strict for function in functions):
                raise InvalidRequest(
                    "custom tools with a grammar need tool_choice 'required' or a named tool with this model; set one "
                    "of them, or set the format of the tools to text"
                )
            raise InvalidRequest(
                "strict tools need tool_choice 'required' or a named function with this model; set one of them, or "
                "remove strict"
            )
    return make_grammar(rules.written(f"{ANY_TEXT} ({section} {ANY_TEXT})?"), prefix)


def _tagged_calls(functions: Sequence[FunctionSchema], tool_format: str, rules: Rules) -> str:
    """Text with calls in it, each an object between tags."""
    call = _calls(rules, functions, _object("arguments"))
    pieces = []
    for index, (trigger, between, end) in enumerate(_TAGS[tool_format]):
        opening = rules.text_until(f"opening_{index}", trigger)
        pieces.append(f"{opening} {quote(between)} {call} {rules.marker(end)}")
    piece = rules.rule("piece", " | ".join(pieces))
    return f"{piece}* {ANY_TEXT}"


def _json_texts(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """Calls in JSON are all of the text, or follow a marker that is a special token. Any other text must neither begin
    like a call nor contain a marker."""
    call = _calls(rules, functions, _object("parameters"), _object("arguments"))
    calls = rules.rule("calls", rf'/\s{{0,8}}/ ({call} (/[;,] ?/ {call})* | "[" {call} (", " {call})* "]")')
    special = [marker for marker in JSON_MARKERS if rules.has(marker)]
    hidden = "|".join(re.escape(marker) for marker in JSON_MARKERS if marker not in special)
    text = rules.rule("TEXT", rf"/\s*[^\s\[{{](?s:.*)/ & ~/(?s:.*)({hidden})(?s:.*)/")
    return " | ".join([f"{text}?", calls, *(f"{text}? {rules.marker(marker)} {calls}" for marker in special)])


def _python_list(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """A list of calls is all of the text, or is between markers. Any other text must not begin like a list. Text may
    come before a marker only if the marker is a special token: a rule for any text cannot stop at a marker in text."""
    markers = "|".join(map(re.escape, PYTHON_MARKERS))
    text = rules.rule("TEXT", rf"/\s*[^\s\[](?s:.*)/ & ~/(?s:.*)({markers})(?s:.*)/")
    arguments = [keyword_arguments(index, function, rules) for index, function in enumerate(functions)]
    alternatives = [f'"{function.name}(" {one} ")"' for function, one in zip(functions, arguments, strict=True)]
    call = rules.rule("call", " | ".join(alternatives))
    calls = rules.rule("calls", f'"[" {call} (", " {call})* "]" | {call} ("\\n" {call})*')
    marked = []
    for start, end in PYTHON_MARKERS.items():
        before = f"{text}?" if rules.has(start, end) else ""
        marked.append(f"{before} {rules.marker(start)} {_BREAK} {calls} {_BREAK} {rules.marker(end)}")
    return " | ".join([f"{text}?", f'"[" {call} (", " {call})* "]"', *marked])


def _harmony_messages(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """Messages in channels. A message to a function is a call, and ends the answer."""
    start, end, channel, message, constrain, call_end = map(rules.marker, _HARMONY)
    body = f'" "? ({constrain} "json" | "json")? " "? {message}'
    call = _calls(
        rules,
        functions,
        lambda name, schema: f'{channel} "commentary to=functions.{name}" {body} {schema}',
        lambda name, schema: f'" to=functions.{name}" {channel} "commentary" {body} {schema}',
    )
    told = rules.rule("told", f'{channel} ("analysis" | "commentary" | "final") {message} {ANY_TEXT}')
    return f'({told} {end} {start} "assistant")* ({told} | {call} {call_end}?)?'


def _solar_calls(functions: Sequence[FunctionSchema], rules: Rules) -> str:
    """Text with calls in it, whose markers are tokens that are not special."""
    arguments, end = map(rules.marker, ("<|tool_call:args|>", "<|tool_call:end|>"))
    call = _calls(rules, functions, lambda name, schema: f'"{name}" {arguments} {schema}')
    opening = rules.text_until("opening", "<|tool_call:begin|>")
    piece = rules.rule("piece", f"{opening} /[^<>]{{0,64}}/ {rules.marker('<|tool_call:name|>')} {call} {end}")
    return f"{piece}* {ANY_TEXT}"


def _object(field: str) -> Callable[[str, str], str]:
    """A call as an object whose arguments are in `field`."""
    return lambda name, schema: f'"{{\\"name\\": \\"{name}\\", \\"{field}\\": " {schema} "}}"'


def _calls(rules: Rules, functions: Sequence[FunctionSchema], *forms: Callable[[str, str], str]) -> str:
    """The rule for a call in one of `forms`, each of which takes the name and the rule of the arguments."""
    alternatives = []
    for function in functions:
        arguments = json_arguments(function, rules, only_if_strict=True)
        alternatives += [form(function.name, arguments) for form in forms]
    return rules.rule("call", " | ".join(alternatives))
