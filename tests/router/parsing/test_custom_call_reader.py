"""The arguments of custom tools become inputs, whole and in pieces of any length."""

import json
import random

import pytest

from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import Content, Part

PATCH = 'Ä "quoted" \\n\n\ttab \u0001 \U0001f600 </x>'
# What the model writes as arguments -> the input.
ARGUMENTS = {
    json.dumps({"input": PATCH}): PATCH,
    json.dumps({"input": PATCH}, ensure_ascii=False): PATCH,
    ' {\n "input" :"a\\/b\\b\\f\\r" }': "a/b\b\f\r",
    '{"input": ""}': "",
    '{"input": "a", "more": "b"}': "a",
    '{"more": "b", "input": "a"}': "a",
    '{"patch": "a"}': "a",
    '{"input": {"a": 1}}': '{"a": 1}',
    '{"a": 1, "b": 2}': '{"a": 1, "b": 2}',
    '"a text"': "a text",
    "*** Begin Patch\n{}": "*** Begin Patch\n{}",
    "{ no json": "{ no json",
    '{"input": "cut \\': "cut ",
    '{"input": "half \\ud83d"}': "half \ufffd",
    '{"input": "half \\ud83d': "half \ufffd",
    '{"input": "half \\udc00 \\u12 \\q"}': "half \ufffd \\u12 \\q",
    "": "",
    "{}": "",
    '"half \\ud83d"': "half \ufffd",
    ' { "inp': "",
    '{"input" : ': "",
}


def pieces_of(text: str, seed: int) -> list[str]:
    """The text in pieces of one to four characters."""
    draw, pieces = random.Random(seed), []
    while text:
        count = draw.randint(1, 4)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


def read(text: str, pieces: list[str], name: str = "patch") -> list[Part]:
    """What a choice consists of whose text comes in these pieces."""
    plan = ParsingPlan(OutputFormat("mistral"), tool_mode="auto", custom_tools=frozenset([name]))
    parser = OutputParser(plan)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return [*parts, *parser.finish()]


@pytest.mark.parametrize("arguments", [text for text in ARGUMENTS if text.lstrip().startswith("{")])
def test_the_input_is_the_same_in_pieces(arguments: str) -> None:
    """The calls of a stream, joined, are those of a whole answer. A call behind a custom call is its own."""
    cut = "" if arguments.endswith("}") else None
    rest = '[TOOL_CALLS]f[ARGS]{"input": "x"}' if cut == "" else ""
    text = f"so [TOOL_CALLS]patch[ARGS]{arguments}{rest}"
    for seed in range(20):
        calls = join_calls(read(text, pieces_of(text, seed)))
        assert [(call.name, call.is_custom) for call in calls] == [("patch", True), ("f", False)][: 2 if rest else 1]
        assert calls[0].arguments == ARGUMENTS[arguments] and calls[0].id
        assert not rest or calls[1].arguments == '{"input": "x"}'


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_in_any_form_are_an_input(arguments: str) -> None:
    """With a named tool all of the text is the arguments."""
    plan = ParsingPlan(tool_mode="named", named_function="patch", custom_tools=frozenset(["patch"]))
    for seed in range(20):
        parser = OutputParser(plan)
        parts = [part for piece in pieces_of(arguments, seed) for part in parser.feed(piece)]
        calls = join_calls([*parts, *parser.finish()])
        assert "".join(call.arguments for call in calls) == ARGUMENTS[arguments]


def test_an_input_is_streamed_while_it_is_generated() -> None:
    """The text of the string is passed on at once, and an escape when it is whole. What is no input makes no parts
    after the first, which has the name."""
    parser = OutputParser(ParsingPlan(tool_mode="named", named_function="p", custom_tools=frozenset(["p"])))
    seen = [
        [call.arguments for call in join_calls(parser.feed(piece))]
        for piece in ("{", '"input": ', '"a', "b\\", "n", "c", '"', "}")
    ]
    assert seen == [[""], [], ["a"], ["b"], ["\n"], ["c"], [], []]


def test_text_after_a_call_ends_it() -> None:
    """The rest of an input in an unknown form comes before the text that follows the call."""
    text = '[TOOL_CALLS]patch[ARGS]{"a": 1, "b": 2}\nmore'
    parts = read(text, [text])
    assert [type(part) is Content for part in parts] == [False, True]
    assert join_calls(parts)[0].arguments == '{"a": 1, "b": 2}'
