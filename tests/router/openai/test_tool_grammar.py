"""The grammars of tool calls allow exactly the arguments that each function's own schema allows."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import MAX_BYTES, Grammar
from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import ToolCallDelta
from coatcheck.router.tool_grammars.call_grammar import named_call_grammar, required_calls_grammar
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar
from tests.router.fake_group import EOS
from tests.router.tiny_tokenizer import byte_level_tokenizer

BYTES = LLTokenizer("byte")
NUMBER: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
WORD: dict[str, Any] = {
    "type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def holding(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with one property x of this schema."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False, **more}


# name -> (schema, arguments that fit it, arguments that do not)
SCHEMAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "$defs": (holding({"$ref": "#/$defs/A"}, **{"$defs": {"A": NUMBER}}), {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "definitions": (
        holding({"$ref": "#/definitions/A"}, definitions={"A": NUMBER}), {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "a root that is a reference": ({"$defs": {"A": NUMBER}, "$ref": "#/$defs/A"}, {"a": 1}, {"a": "x"}),
    "the root itself": (
        holding({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), {"x": {"x": None}}, {"x": {"x": 1}}),
    "a definition of itself": (
        {"$defs": {"Tree": holding({"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]})}, "$ref": "#/$defs/Tree"},
        {"x": {"x": None}}, {"x": {"x": 1}}),
    "another property": (
        {"type": "object", "properties": {"x": NUMBER, "y": {"$ref": "#/properties/x"}}, "required": ["x", "y"]},
        {"x": {"a": 1}, "y": {"a": 2}}, {"x": {"a": 1}, "y": {"a": "x"}}),
    "a place in a list": (
        {"anyOf": [NUMBER, holding({"$ref": "#/anyOf/0"})]}, {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "escapes": (
        holding({"$ref": "#/$defs/a~1b~0c%20%C3%A4%5B0%5D"}, **{"$defs": {"a/b~c ä[0]": NUMBER}}),
        {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "an anchor": (
        holding({"$ref": "#here"}, **{"$defs": {"A": {**NUMBER, "$anchor": "here"}}}), {"x": {"a": 1}}, {"x": 1}),
    "its own id": (
        holding({"$ref": "http://localhost/s.json#/$defs/A"}, **{"$id": "http://localhost/s.json",
                                                               "$defs": {"A": NUMBER}}),
        {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "an id within": (
        holding({"$ref": "A"}, **{"$id": "http://localhost/s", "$defs": {
            "A": {"$id": "A", "$defs": {"B": NUMBER}, "$ref": "#/$defs/B"}, "B": WORD}}),
        {"x": {"a": 1}}, {"x": {"a": "x"}}),
    "draft 7": (
        {"$schema": DRAFT_7, "$ref": "#/definitions/A", "definitions": {"A": NUMBER}}, {"a": 1}, {"a": "x"}),
    "draft 4": (
        {"$schema": DRAFT_4, "id": "http://localhost/s", "$ref": "#/definitions/A", "definitions": {"A": NUMBER}},
        {"a": 1}, {"a": "x"}),
    "a property named $ref": (
        {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/A"}}, "required": ["$ref"],
         "additionalProperties": False, "$defs": {"A": NUMBER}}, {"$ref": {"a": 1}}, {"$ref": {"a": "x"}}),
    "const": (holding({"const": {"$ref": "#/$defs/A"}}), {"x": {"$ref": "#/$defs/A"}}, {"x": {"$ref": "#/A"}}),
    "enum": (holding({"enum": [{"$ref": "#"}]}), {"x": {"$ref": "#"}}, {"x": {"$ref": "#/a"}}),
    "default and examples": (
        holding({"type": "integer", "default": {"$ref": "#/a"}, "examples": [{"$ref": "#/b"}]}), {"x": 1}, {"x": "x"}),
    "no parameters": ({}, {"b": [1]}, 5),
}  # fmt: skip


def fits(grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows an answer that begins with the text."""
    grammar.check_compiles()
    matcher = LLMatcher(BYTES, grammar.to_llguidance(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.validate_tokens(data) == len(data))


def call(name: str, arguments: Any) -> str:
    """The text of a call, as a model writes it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@pytest.mark.parametrize("case", SCHEMAS)
def test_references_mean_what_they_mean_in_their_own_schema(case: str) -> None:
    """If several functions have definitions of the same names, each call fits the schema of its own function."""
    schema, good, bad = SCHEMAS[case]
    other = holding({"$ref": "#/$defs/A"}, **{"$defs": {"A": WORD}, "definitions": {"A": WORD}, "$anchor": "here"})
    functions = [Function(name="other", parameters=other), Function(name="f", parameters=schema, strict=True)]
    required, named, strict = (
        required_calls_grammar(functions, True),
        named_call_grammar(functions[1]),
        strict_calls_grammar(functions, "hermes", {}),
    )
    assert fits(named, json.dumps(good)) and not fits(named, json.dumps(bad))
    assert fits(required, f"[{call('f', good)}, {call('other', {'x': {'a': 'x'}})}]")
    assert not fits(required, f"[{call('f', bad)}")
    assert not fits(required, f"[{call('other', {'x': {'a': 1}})}")
    assert fits(strict, f"so <tool_call>\n{call('f', good)}\n</tool_call> and more")
    assert not fits(strict, f"<tool_call>\n{call('f', bad)}\n</tool_call>")


def test_a_schema_with_the_same_id_is_another_function_s_own() -> None:
    """Two functions whose schemas differ but have the same `$id` keep their own schemas."""
    schemas = [
        {"$id": "http://localhost/s", "$defs": {"A": content}, "$ref": "http://localhost/s#/$defs/A"}
        for content in (NUMBER, WORD)
    ]
    grammar = required_calls_grammar(
        [Function(name=f"f{n}", parameters=schema) for n, schema in enumerate(schemas)], True
    )
    assert fits(grammar, f"[{call('f0', {'a': 1})}, {call('f1', {'a': 'x'})}]")
    assert not fits(grammar, f"[{call('f0', {'a': 'x'})}") and not fits(grammar, f"[{call('f1', {'a': 1})}")


def test_as_many_calls_as_are_allowed() -> None:
    """At least one call; more only with parallel calls."""
    functions = [Function(name="f", parameters=NUMBER), Function(name="f.g")]
    one, two = f"[{call('f', {'a': 1})}", f"[{call('f', {'a': 1})}, {call('f.g', {})}"
    for parallel in (True, False):
        grammar = required_calls_grammar(functions, parallel)
        assert not fits(grammar, "[]") and fits(grammar, one + "]") and not fits(grammar, f"[{call('g', {})}")
        assert fits(grammar, two + "]") is parallel


def test_as_many_functions_as_a_chat_may_have() -> None:
    """1,024 functions without parameters, or with equal ones, compile."""
    for schema in (None, NUMBER):
        functions = [Function(name=f"function_{place}", parameters=schema) for place in range(MAX_TOOLS)]
        grammar = required_calls_grammar(functions, True)
        assert fits(grammar, f"[{call('function_1023', {'a': 1})}]") and not fits(grammar, f"[{call('other', {})}")


def test_json_style_may_be_the_schema_s_own() -> None:
    """One space after commas and colons and no other whitespace, unless the schema's x-guidance differs."""
    spaced = '[{"name": "f", "arguments": {"a":   1}}]'
    assert not fits(required_calls_grammar([Function(name="f", parameters=NUMBER)], True), spaced)
    free = {**NUMBER, "x-guidance": {"whitespace_flexible": True}}
    assert fits(required_calls_grammar([Function(name="f", parameters=free)], True), spaced)


@pytest.mark.parametrize(
    ("schema", "words"),
    [({"$ref": "#/$defs/Z"}, "'/\\$defs/Z' does not exist"), ({"x": "a" * MAX_BYTES}, "fewer tools or shorter")],
)
def test_what_cannot_be_kept_to_says_why(schema: dict[str, Any], words: str) -> None:
    """A reference to nothing, and schemas that are too large, are refused with the reason."""
    with pytest.raises(InvalidRequest, match=words):
        required_calls_grammar([Function(name="f", parameters=schema)], True).check_compiles()


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
}  # fmt: skip


def allows(grammar: Grammar, special: tuple[str, ...], text: str) -> bool:
    """Whether the grammar allows an answer that begins with the text, whose markers are special tokens."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    grammar.check_compiles()
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=EOS), grammar.to_llguidance())
    ids = tokenizer.encode(text).ids
    return bool(matcher.validate_tokens(ids) == len(ids))


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


@pytest.mark.parametrize("tool_format", ["openai", "mistral", "kimi_k2", "deepseek_v3", "gemma4"])
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
