"""Strict tools with `auto`: each tool format's own grammar, and its calls as the parser reads them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.openai.strict_calls import strict_calls_grammar
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import ToolCallDelta
from tests.router.fake_group import EOS
from tests.router.tiny_tokenizer import byte_level_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False,
}  # fmt: skip
FUNCTIONS = [Function(name="f", parameters=SCHEMA, strict=True), Function(name="free", parameters=SCHEMA)]
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
# name -> (tool format, special tokens, how one call looks, and how two look)
FORMATS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "hermes": ("hermes", (), '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "ONE\nONE"),
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
    tool_format, special, one, two = FORMATS[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    return strict_calls_grammar(FUNCTIONS, tool_format, ids), special, one, two


@pytest.mark.parametrize("case", FORMATS)
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
    plan = ParsingPlan(OutputFormat(FORMATS[case][0]), tool_mode="auto")
    parts = OutputParser(plan).feed_delta(good, is_last=True)
    calls = [part for part in parts if isinstance(part, ToolCallDelta)]
    assert [call.name for call in calls] == ["f", "f"]
    assert [json.loads(call.arguments) for call in calls] == [{"n": 5}, {"n": 5}]


@pytest.mark.parametrize(
    "tool_format", ["llama3_json", "pythonic", "glm45", "qwen3_coder", "minimax_m2", "openai", "mistral", "kimi_k2"]
)
def test_formats_that_no_grammar_enforces_are_refused(tool_format: str) -> None:
    """So are formats whose markers are not special tokens of the tokenizer."""
    with pytest.raises(InvalidRequest, match="strict tools need tool_choice"):
        strict_calls_grammar(FUNCTIONS, tool_format, {})
