"""Strict calls of Gemma 4: what fits is allowed and is read; what does not fit is not."""

import json
from typing import Any

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.gemma_tool_parser import END, QUOTE, START
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.tool_grammars.input_grammar import CustomFunction, InputGrammar
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.router.tool_grammars.allowed_text import allows

TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "place": {"$ref": "#/$defs/Place"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "kinds": {"type": ["integer", "string"]},
        "level": {"enum": [1, "high", None]},
        "free": {},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object", "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/Place"}},
            "required": ["name"], "additionalProperties": False,
        },
    },
}  # fmt: skip
FUNCTIONS = [
    Function(name="f", parameters=TRIP, strict=True),
    Function(name="g", parameters={"type": "object", "additionalProperties": False}, strict=True),
    Function(name="free", parameters=TRIP),
]
WHOLE = {"city": "Bonn, {x}", "days": [1, 2]}
PLAIN = "city:'Bonn, {x}',days:[1,2]"
# Arguments with ' for the marker -> what they mean.
ARGUMENTS: dict[str, dict[str, Any]] = {
    PLAIN: WHOLE,
    "city:'Bonn, {x}',counts:{a:1,b:2},days:[1,2]": {**WHOLE, "counts": {"a": 1, "b": 2}},
    "city:'Bonn, {x}',counts:{},days:[1,2],either:null": {**WHOLE, "counts": {}, "either": None},
    f"{PLAIN},either:'x',free:[1,'a',{{b:true}}],kinds:'k'": {
        **WHOLE, "either": "x", "free": [1, "a", {"b": True}], "kinds": "k"},
    f"{PLAIN},kinds:7,level:'high'": {**WHOLE, "kinds": 7, "level": "high"},
    f"{PLAIN},level:null,place:{{in:{{name:'a'}},name:'b'}},unit:'F'": {
        **WHOLE, "level": None, "place": {"in": {"name": "a"}, "name": "b"}, "unit": "F"},
}  # fmt: skip
ALLOWED = ["only text", "", "Scall:g{}E more", "Scall:free{x:[],y:{z:'a'}}E", f"Scall:f{{{PLAIN}}}E" * 2]
REFUSED = [
    "Scall:h", "Scall:f{}", "Scall:f{days", "Scall:f{city:5", "Scall:f{city:'a',days:[]",
    "Scall:f{city:'a',days:[1,2,3", "Scall:f{city:'a',days:['1'", "Scall:g{x", "S so",
    *(f"Scall:f{{{PLAIN},{rest}" for rest in ("either:1", "level:2", "more:1", "place:{}", "unit:'K'")),
]  # fmt: skip


def marked(text: str) -> str:
    """The text with the format's markers in place of S, E and '."""
    return text.replace("S", START).replace("E", END).replace("'", QUOTE)


@pytest.mark.parametrize("special", [(), (START, END, QUOTE)])
def test_calls_fit_their_schemas(special: tuple[str, ...]) -> None:
    """With markers that are special tokens, and with some that are text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    grammar = strict_calls_grammar(FUNCTIONS, "gemma4", ids)
    plan = ParsingPlan(OutputFormat("gemma4"), tool_mode="auto", schemas={"f": TRIP})
    for given, arguments in ARGUMENTS.items():
        text = marked(f"so Scall:f{{{given}}}E")
        assert allows(grammar, special, text), given
        (call,) = join_calls(OutputParser(plan).feed_delta(text, is_last=True))
        assert (call.name, json.loads(call.arguments)) == ("f", arguments), given
    for given in ALLOWED:
        assert allows(grammar, special, marked(given)), given
    for given in REFUSED:
        assert not allows(grammar, special, marked(given)), given


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [('start: "+" /.*/ LF\n%import common.LF\n', "+a, {b}\n", "-a"), ('start: "(" start ")" | "x"', "((x))", "((x)]")],
)
def test_an_input_of_a_custom_tool_is_a_string(definition: str, good: str, bad: str) -> None:
    """Its text is as it is, up to the marker."""
    tool = CustomFunction("patch", input_grammar=InputGrammar("lark", definition))
    grammar = strict_calls_grammar([tool], "gemma4", {})
    text = marked(f"Scall:patch{{input:'{good}'}}E")
    assert allows(grammar, (), text) and not allows(grammar, (), text.replace(good, bad))
    plan = ParsingPlan(OutputFormat("gemma4"), tool_mode="auto", custom_tools=frozenset(["patch"]))
    (call,) = join_calls(OutputParser(plan).feed_delta(text, is_last=True))
    assert call.arguments == good


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"allOf": [{"type": "string"}]}, "'allOf' in a part"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' in a part of type 'array'"),
        ({"type": "object", "properties": {"a:b": {}}}, "wrong names"),
        ({"type": "object", "properties": {"a": {}}, "required": 5}, "wrong names"),
        ({"type": "array", "minItems": "x"}, "a number of items"),
        ({"anyOf": []}, "'anyOf' in a part"),
        ({"enum": [[1]]}, "a list in an enum"),
        ({"type": "array", "minItems": -1}, "no integer of at least 0"),
        ({"anyOf": [False]}, "a part that is no schema"),
        ({"type": {}}, "a type that is neither"),
        ({"type": ["string", 5]}, "a type that is neither"),
        ({"type": "text"}, "the type 'text'"),
    ],
)
def test_parts_that_cannot_be_enforced_are_refused(part: dict[str, Any], words: str) -> None:
    """The error names the function and the part."""
    schema = {"type": "object", "properties": {"a": part}}
    with pytest.raises(InvalidRequest, match=words):
        strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], "gemma4", {})


@pytest.mark.parametrize("tool_format", ["gemma4", "minimax_m3"])
def test_a_deeply_nested_schema_does_not_exceed_the_stack(tool_format: str) -> None:
    """At the depth at which bodies are refused."""
    part: dict[str, Any] = {"type": "integer"}
    for _ in range(250):
        part = {"type": "array", "items": part}
    schema = {"type": "object", "properties": {"a": part}}
    grammar = strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], tool_format, {})
    assert grammar.text.count("\n") > 250


@pytest.mark.parametrize("tool_format", ["gemma4", "minimax_m3"])
def test_references_that_exceed_the_stack_are_refused(tool_format: str) -> None:
    """A chain of definitions is as deep as it is long."""
    lists: dict[str, Any] = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(1000)}
    parts = {"a": {"$ref": "#/$defs/d0"}}
    schema = {"type": "object", "properties": parts, "$defs": lists | {"d1000": {"type": "integer"}}}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], tool_format, {})


def test_a_grammar_repeats_nothing() -> None:
    """Neither a type that is given twice, nor definitions to which a number does not refer."""
    parts = {f"n{n}": {"type": ["integer"] * 100, "description": f"number {n}"} for n in range(100)}
    schema = {"type": "object", "properties": parts, "$defs": {"unused": {"description": "x" * 10000}}}
    grammar = strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], "gemma4", {})
    assert len(grammar.text) < 50000
