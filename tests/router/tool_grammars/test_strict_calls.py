"""The grammars of strict calls allow any text, and in it only calls that fit the schemas of their functions."""

import json
from typing import Any

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import ToolCallDelta
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.router.tool_grammars.allowed_text import allows

STRICT_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False,
}  # fmt: skip
FUNCTIONS = [Function(name="f", parameters=STRICT_SCHEMA, strict=True), Function(name="free", parameters=STRICT_SCHEMA)]
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
# name -> (tool format, special tokens, how one call looks, and how two look)
STRICT_FORMATS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "hermes": ("hermes", (), '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "ONE\nONE"),
    "nemotron": ("hermes", (), '<TOOLCALL>[{"name": "NAME", "arguments": ARGS}]</TOOLCALL>', "ONE\nONE"),
    "minimax": ("minimax", (), '<tool_calls>\n{"name": "NAME", "arguments": ARGS}\n</tool_calls>', "ONE\nONE"),
    "mistral": ("mistral", ("[TOOL_CALLS]",), '{"name": "NAME", "arguments": ARGS}', "[TOOL_CALLS][ONE, ONE]"),
    "mistral with [ARGS]": ("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]NAME[ARGS]ARGS", "ONEONE"),
    "deepseek v3": (
        "deepseek_v3", DEEPSEEK,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>ONE\nONE<｜tool▁calls▁end｜>"),
    "deepseek v3.1": (
        "deepseek_v3", DEEPSEEK, "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>ONEONE<｜tool▁calls▁end｜>"),
    "kimi": (
        "kimi_k2", KIMI,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
        "<|tool_calls_section_begin|>ONEONE<|tool_calls_section_end|>"),
    "apertus": (
        "apertus", ("<|tools_prefix|>", "<|tools_suffix|>"), '{"NAME": ARGS}',
        "<|tools_prefix|>[ONE, ONE]<|tools_suffix|>"),
    "solar open": (
        "solar_open", (), "<|tool_call:begin|>a1b2<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>",
        "<|tool_calls|>ONEONE"),
}  # fmt: skip


def made(case: str) -> tuple[Grammar, tuple[str, ...], str, str]:
    tool_format, special, one, two = STRICT_FORMATS[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    return strict_calls_grammar(FUNCTIONS, tool_format, ids), special, one, two


@pytest.mark.parametrize("case", STRICT_FORMATS)
def test_calls_fit_their_schemas_and_are_read(case: str) -> None:
    """Text and calls that fit are allowed, and the format's parser reads them; others are not."""
    grammar, special, one, two = made(case)

    def text(name: str, arguments: str) -> str:
        call = one.replace("NAME", name).replace("[ARGS]", "\0").replace("ARGS", arguments).replace("\0", "[ARGS]")
        return "Well. " + two.replace("ONE", call)

    good = text("f", '{"n": 5}')
    assert allows(grammar, special, good)
    assert allows(grammar, special, "only text")
    assert allows(grammar, special, text("free", '{"n": "five"}'))
    assert not allows(grammar, special, text("f", '{"n": "five"}'))
    assert not allows(grammar, special, text("other", '{"n": 5}'))
    plan = ParsingPlan(OutputFormat(STRICT_FORMATS[case][0]), tool_mode="auto")
    parts = OutputParser(plan).feed_delta(good, is_last=True)
    calls = [part for part in parts if isinstance(part, ToolCallDelta)]
    assert [call.name for call in calls] == ["f", "f"]
    assert [json.loads(call.arguments) for call in calls] == [{"n": 5}, {"n": 5}]


STEP = (
    "<｜tool_calls_begin｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_sep｜>",
    "<｜tool_call_end｜>",
    "<｜tool_calls_end｜>",
)
SOLAR_2 = (
    "<|tool_call:start|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"
)  # fmt: skip
HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Day": {"type": "integer"}},
}  # fmt: skip
PLACES = [
    Function(name="f", parameters=PLACE, strict=True),
    Function(name="g", parameters={"type": "object", "additionalProperties": False}, strict=True),
    Function(name="free", parameters=PLACE),
]
BONN = {"city": "Bonn", "days": [1, 2]}
# name -> (tool format, special tokens, texts with the call f(BONN), other texts that are allowed, texts that are not)
ARGUMENT_FORMATS: dict[str, tuple[str, tuple[str, ...], list[str], list[str], list[str]]] = {
    "llama": (
        "llama3_json", ("<|python_tag|>",),
        ['{"name": "f", "parameters": {"city": "Bonn", "days": [1, 2]}}',
         'so <|python_tag|>{"name": "f", "arguments": {"city": "Bonn", "days": [1, 2]}}'],
        ['{"name": "g", "parameters": {}}; {"name": "free", "parameters": {"x": 1}}', "so { no call }", ""],
        ['{"name": "f", "parameters": {"city": 5', '{"name": "h"', "[5]", '{"a": 1}']),
    "llama without its token": (
        "llama3_json", (), ['[{"name": "f", "parameters": {"city": "Bonn", "days": [1, 2]}}]'], ["a <|python_ta"],
        ["so <|python_tag|>"]),
    "granite": (
        "llama3_json", ("<|tool_call|>",),
        ['so <|tool_call|>[{"name": "f", "arguments": {"city": "Bonn", "days": [1, 2]}}]'], ["so functools"],
        ['so <|tool_call|>[{"name": "h"', "<|tool_call|>so", 'so functools[{"name"']),
    "lfm2": (
        "pythonic", ("<|tool_call_start|>", "<|tool_call_end|>"),
        ['so <|tool_call_start|>[f(city="Bonn", days=[1, 2])]<|tool_call_end|>'], ["so f("],
        ["so <|tool_call_start|>[h(", "<|tool_call_start|>so", "so <function_calls>"]),
    "olmo": (
        "pythonic", (), ['<function_calls>\nf(city="Bonn", days=[1, 2])\n</function_calls>'],
        ['<function_calls>g()\nfree(x=true)</function_calls>'], ["<function_calls>\nh(", "so <|tool_call_start|>"]),
    "pythonic": (
        "pythonic", (), ['[f(city="Bonn", days=[1, 2])]'],
        ['[g(), free(x=true, y={"a": null})]', '[f(city="B", unit="C", days=[])]', "so f(", "a [1]"],
        ['[f(city=5', '[f(days=[1]', '[f(city="B")', "[h(", "[g(x", "[1]", "<|python_start|>so"]),
    "qwen3 coder": (
        "qwen3_coder", (),
        ["so <tool_call>\n<function=f>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>"
         "\n</function>\n</tool_call>"],
        ["<function=g>\n</function>\n<function=free>\n<parameter=x>\n1\n</parameter>\n</function> and more",
         "<function=f><parameter=city>a < b</parameter><parameter=unit>C</parameter><parameter=days>[]</parameter>"],
        ["<function=f>\n</function>", "<function=h", "<function=f><parameter=days>",
         "<function=f><parameter=city>x</parameter><parameter=unit>K",
         "<function=f><parameter=city>x</parameter><parameter=days>\n[1.5"]),
    "minimax m2": (
        "minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>"),
        ['<minimax:tool_call><invoke name="f"><parameter name="city">Bonn</parameter><parameter name="days">[1, 2]'
         "</parameter></invoke></minimax:tool_call>"],
        ['<invoke name="g"></invoke>'],
        ['<invoke name="h', '<invoke name="f"><parameter name="city">x</parameter></i']),
    "deepseek v3.2": (
        "deepseek_v32", (),
        ['<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Bonn</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>'],
        ['<｜DSML｜function_calls><｜DSML｜invoke name="g"></｜DSML｜invoke>',
         '<｜DSML｜invoke name="free"><｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>'],
        ['<｜DSML｜invoke name="h', '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="false"']),
    "glm": (
        "glm45", (),
        ["<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n<arg_value>"
         "[1, 2]</arg_value>\n</tool_call>"],
        ["<tool_call>g\n</tool_call>", "<tool_call>free<arg_key>x</arg_key><arg_value>1</arg_value></tool_call> so"],
        ["<tool_call>h", "<tool_call>f</tool_call>", "<tool_call>f<arg_key>days"]),
    "step 3": (
        "step3", STEP,
        ['so<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
         '<steptml:parameter name="city">Bonn</steptml:parameter>\n'
         '<steptml:parameter name="days">[1, 2]</steptml:parameter>\n'
         "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"],
        ['<steptml:invoke name="g"></steptml:invoke>', "only text"],
        ['<steptml:invoke name="h', '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="h']),
    "kimi k3": (
        "kimi_k3", ("<|open|>", "<|close|>", "<|sep|>"),
        ['so<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="'
         'city" type="string"<|sep|>Bonn<|close|>argument<|sep|><|open|>argument key="days" type="array"<|sep|>[1, 2]'
         "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"],
        ["only text<|close|>response<|sep|>", '<|open|>call tool="g" index="12"<|sep|><|close|>call<|sep|>',
         '<|open|>call tool="free" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>5<|close|>argument'],
        ['<|open|>call tool="h', '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="city" type="number"',
         '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="days"',
         '<|open|>call tool="f" index="1"<|sep|><|close|>call']),
    "solar open 2": (
        "solar_open2", SOLAR_2,
        ["so<|tool_call:start|>f\n<|tool_arg:start|>city<|tool_arg:value|>Bonn<|tool_arg:end|>\n<|tool_arg:start|>days"
         "<|tool_arg:value|>[1, 2]<|tool_arg:end|>\n<|tool_call:end|>"],
        ["<|tool_call:start|>g\n<|tool_call:end|>"],
        ["<|tool_call:start|>h", "<|tool_call:start|>f\n<|tool_call:end|>"]),
    "gpt-oss": (
        "openai", HARMONY,
        ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         '<|constrain|>json<|message|>{"city": "Bonn", "days": [1, 2]}<|call|>',
         ' to=functions.f<|channel|>commentary json<|message|>{"city": "Bonn", "days": [1, 2]}'],
        ["<|channel|>final<|message|>only text", '<|channel|>commentary to=functions.free<|message|>{"x": 1}<|call|>'],
        ['<|channel|>commentary to=functions.f<|message|>{"city": 5', "<|channel|>commentary to=functions.h", "text"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENT_FORMATS)
def test_arguments_in_other_forms_fit_their_schemas(case: str) -> None:
    """Formats that write calls as texts, as Python or with tags: calls that fit are allowed, and read by the format's
    parser; others are not, and neither is a text that the parser would take for a call."""
    tool_format, special, called, allowed, refused = ARGUMENT_FORMATS[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    grammar = strict_calls_grammar(PLACES, tool_format, ids)
    plan = ParsingPlan(OutputFormat(tool_format), tool_mode="auto", schemas={"f": PLACE})
    for text in (*called, *allowed):
        assert allows(grammar, special, text), text
    for text in called:
        (one,) = join_calls(OutputParser(plan).feed_delta(text, is_last=True))
        assert (one.name, json.loads(one.arguments)) == ("f", BONN), text
    for text in refused:
        assert not allows(grammar, special, text), text


@pytest.mark.parametrize(
    ("choices", "allowed", "refused"),
    [
        ({"enum": ["", "C"]}, ("", "C"), ("K", "CC")),
        ({"enum": [""]}, ("",), ("C",)),
        ({"const": ""}, ("",), ("C",)),
        ({}, ("", "C", "K"), ()),
    ],
)
def test_an_empty_text_is_a_choice_like_another(
    choices: dict[str, Any], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    """An argument that may be the empty text may not be any text."""
    schema = {"type": "object", "properties": {"unit": {"type": "string", **choices}}, "required": ["unit"],
              "additionalProperties": False}  # fmt: skip
    grammar = strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], "qwen3_coder", {})
    for unit in (*allowed, *refused):
        call = f"<tool_call>\n<function=f>\n<parameter=unit>\n{unit}\n</parameter>\n</function>\n</tool_call>"
        assert allows(grammar, (), call) == (unit in allowed), unit


@pytest.mark.parametrize("tool_format", ["openai", "mistral", "kimi_k2", "deepseek_v3", "apertus"])
def test_formats_without_their_tokens_are_refused(tool_format: str) -> None:
    """Formats whose markers must be special tokens of the tokenizer."""
    with pytest.raises(InvalidRequest, match="strict tools need tool_choice"):
        strict_calls_grammar(FUNCTIONS, tool_format, {})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({**PLACE, "anyOf": [PLACE]}, "'anyOf' at their root"),
        ({"properties": {"a>b": {}}}, "the name 'a>b'"),
        ({"properties": {"a": {"$ref": "#"}}}, "the reference '#'"),
        ({"properties": {"a": True}}, "properties that are no schemas"),
        ({"properties": {"a": {}}, "required": 5}, "'required' that is no list"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "'required' that is no list"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'required' that is no list of names of properties"),
        (
            {"properties": {f"a{i}": {"$ref": "#/$defs/x"} for i in range(99)}, "$defs": {"x": {"title": "y" * 50000}}},
            "each argument of a strict function may need a copy",
        ),
    ],
)
@pytest.mark.parametrize("tool_format", ["pythonic", "qwen3_coder"])
def test_schemas_that_cannot_be_taken_apart_are_refused(tool_format: str, schema: dict[str, Any], words: str) -> None:
    """The error names the function and what of its schema is not enforced."""
    with pytest.raises(InvalidRequest, match=words):
        strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], tool_format, {})
