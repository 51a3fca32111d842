"""The grammars of tool calls allow exactly the arguments that each function's own schema allows."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import MAX_BYTES, Grammar
from coatcheck.router.event_loop.message_limits import MAX_TOOLS
from coatcheck.router.openai.tools import Function
from coatcheck.router.tool_grammars.call_grammar import named_call_grammar, required_calls_grammar
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar

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
