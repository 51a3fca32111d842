"""Strict calls of MiniMax M3, whose arguments are tags: what fits is allowed and is read; what does not fit is not."""

import json
from typing import Any

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.minimax_tool_parser import MARK
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
        "unit": {"type": "string", "enum": ["C", "F", ""]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "place": {
            "type": "object", "properties": {"name": {"type": "string"}, "tags": {"$ref": "#/$defs/Tags"}},
            "required": ["name"], "additionalProperties": False,
        },
        "tree": {"$ref": "#/$defs/Tree"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "Tags": {"type": "array", "items": {"type": "string"}, "title": "Tags"},
        "Tree": {
            "type": "object", "required": ["n"],
            "properties": {"n": {"type": "number"}, "inner": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
        },
    },
}  # fmt: skip
FUNCTIONS = [
    Function(name="f", parameters=TRIP, strict=True),
    Function(name="g", parameters={"type": "object", "additionalProperties": False}, strict=True),
    Function(name="free", parameters=TRIP),
]
OPEN, CLOSE = '@<invoke name="f">', "@</invoke>"
CITY, DAYS = "@<city>Bonn@</city>", "@<days>@<item>1@</item>@<item>2@</item>@</days>"
WHOLE = {"city": "Bonn", "days": [1, 2]}
# A text with @ for the mark -> the arguments of its only call.
CALLS: dict[str, dict[str, Any]] = {
    f"so\n@<tool_call>\n{OPEN}\n{CITY}\n{DAYS}\n{CLOSE}\n@</tool_call>": WHOLE,
    f"{OPEN}{CITY}{DAYS}{CLOSE}": WHOLE,
    f"{OPEN}@<city>a < b\n</city>@</city>@<days>@</days>{CLOSE}": {"city": "a < b\n</city>", "days": []},
    f"{OPEN}{CITY}@<unit>F@</unit>{DAYS}{CLOSE}": {"city": "Bonn", "unit": "F", "days": [1, 2]},
    f"{OPEN}{CITY}@<unit>@</unit>{DAYS}{CLOSE}": {"city": "Bonn", "unit": "", "days": [1, 2]},
    f"{OPEN}{CITY}{DAYS}@<place>@<name>5@</name>@<tags>@<item>6@</item>@</tags>@</place>{CLOSE}": {
        **WHOLE, "place": {"name": "5", "tags": ["6"]}},
    f"{OPEN}{CITY}{DAYS}@<tree>\n@<n>1.5@</n>\n@<inner>\n@<item>@<n>2@</n>@<inner>@</inner>@</item>@</inner>@</tree>"
    f"{CLOSE}": {**WHOLE, "tree": {"n": 1.5, "inner": [{"n": 2, "inner": []}]}},
    f"{OPEN}{CITY}{DAYS}@<either>null@</either>@<pair>[1, 2]@</pair>@<counts>{{\"a\": 1}}@</counts>{CLOSE}": {
        **WHOLE, "either": None, "pair": [1, 2], "counts": {"a": 1}},
}  # fmt: skip
ALLOWED = [
    "only text", "", '@<invoke name="g">@</invoke>', '@<invoke name="free">@<x>1@<y>2@</y>@</x>\n@</invoke> more',
    f"{OPEN}{CITY}{DAYS}{CLOSE}\n{OPEN}{CITY}{DAYS}{CLOSE}", "a <b> c",
]  # fmt: skip
REFUSED = [
    '@<invoke name="h', f"{OPEN}{CLOSE}", f"{OPEN}{DAYS}", f"{OPEN}{CITY}@<days>@<item>x",
    f"{OPEN}{CITY}@<days>1", f"{OPEN}{CITY}@<unit>K", f"{OPEN}{CITY}{DAYS}@<place>@<tags>", f"{OPEN}@<city>a@<b>",
    f"{OPEN}{CITY}{DAYS}@<tree>@<n>1@</n>@<inner>@<item>@<inner>", f"{OPEN}{CITY}{DAYS}@<pair>[1]@",
    f"{OPEN}{CITY}{DAYS}@<counts>{{\"a\": \"x", f"{OPEN}{CITY}{DAYS}@<more>", '@<invoke name="g">@<x>',
    '@<invoke name="free">@<x>1@</x>@</invoke>@<invoke name="h',
]  # fmt: skip


@pytest.mark.parametrize("special", [(), (MARK,)])
def test_calls_fit_their_schemas(special: tuple[str, ...]) -> None:
    """With a mark that is a special token, and with one that is text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    grammar = strict_calls_grammar(FUNCTIONS, "minimax_m3", ids)
    plan = ParsingPlan(OutputFormat("minimax_m3"), tool_mode="auto", schemas={"f": TRIP})
    for marked, arguments in CALLS.items():
        text = marked.replace("@", MARK)
        assert allows(grammar, special, text), marked
        (call,) = join_calls(OutputParser(plan).feed_delta(text, is_last=True))
        assert (call.name, json.loads(call.arguments)) == ("f", arguments), marked
    for marked in ALLOWED:
        assert allows(grammar, special, marked.replace("@", MARK)), marked
    for marked in REFUSED:
        assert not allows(grammar, special, marked.replace("@", MARK)), marked


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ('start: "+" /.*/ LF\n%import common.LF\n', "+a </input>\n", "-a"),
        ('start: "(" start ")" | "x"', "((x))", "((x)]"),
    ],
)
def test_an_input_of_a_custom_tool_is_a_tag(definition: str, good: str, bad: str) -> None:
    """Its text is as it is, up to the mark."""
    tool = CustomFunction("patch", input_grammar=InputGrammar("lark", definition))
    grammar = strict_calls_grammar([tool], "minimax_m3", {})
    text = f'@<invoke name="patch">@<input>{good}@</input>@</invoke>'.replace("@", MARK)
    assert allows(grammar, (), text) and not allows(grammar, (), text.replace(good, bad))
    plan = ParsingPlan(OutputFormat("minimax_m3"), tool_mode="auto", schemas={"patch": tool.parameters},
                       custom_tools=frozenset(["patch"]))  # fmt: skip
    (call,) = join_calls(OutputParser(plan).feed_delta(text, is_last=True))
    assert call.arguments == good


@pytest.mark.parametrize("name", ["tool_call", "invoke", "a b", "/a", "a>"])
def test_names_that_are_no_tags_of_arguments_are_refused(name: str) -> None:
    """The error names the property."""
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(InvalidRequest, match="the name"):
        strict_calls_grammar([Function(name="f", parameters=schema, strict=True)], "minimax_m3", {})
