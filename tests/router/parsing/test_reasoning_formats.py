"""Reasoning of models that write each part of an answer into a channel, or that mark reasoning in their own way."""

from typing import Any

import pytest

from coatcheck.proto.grammar import Grammar
from coatcheck.router.parsing.output_format import OutputFormat, find_reasoning_start
from coatcheck.router.parsing.output_parser import ParsingPlan
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart, reasoning_rules
from tests.router.parsing.parsed_text import read_every_cut
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.router.tool_grammars.allowed_text import allows

OPEN, CLOSED, UNDECIDED = ReasoningStart.OPEN, ReasoningStart.CLOSED, ReasoningStart.UNDECIDED
K3 = "{%- macro close_tag(tag) -%}{{- '<|close|>' + tag + '<|sep|>' -}}{{- '<|open|>' -}}"
K3_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="number"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
K3_ANSWER = "<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>"
K3_END = "<|close|>message<|sep|>"
SOLAR = "<|begin|>assistant<|think|><|end|> <|content|> <|tool_call:begin|>"
SOLAR_CALL = '<|tool_call:begin|>ab<|tool_call:name|>f<|tool_call:args|>{"n": 1}<|tool_call:end|>'
SOLAR_2 = "<|think:start|><|think:end|><|tool_call:start|>"
APERTUS = "<|inner_prefix|> <|inner_suffix|> <|tools_prefix|>"
APRIEL = "Here are my reasoning steps: [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE] <tool_calls>["
M3 = "]<]minimax[>[ <mm:think> </mm:think>"
F = [("f", '{"n": 1}')]
# (what a chat template has, where the prompt ends, text, reasoning, content, calls)
CASES: list[tuple[str, ReasoningStart, str, str, str, list[tuple[str, str]]]] = [
    (K3, OPEN, f"hm{K3_ANSWER}{K3_END}", "hm", "yes", []),
    (K3, OPEN, f"hm{K3_ANSWER}{K3_CALL}{K3_END}", "hm", "yes", F),
    (K3, OPEN, f"hm{K3_CALL}", "hm", "", F),
    (K3, OPEN, "hm<|close|>think", "hm<|close|>think", "", []),
    (K3, CLOSED, f"yes <b><|close|>response<|sep|>{K3_END}", "", "yes <b>", []),
    (K3, UNDECIDED, f"<|open|>think<|sep|>hm{K3_ANSWER}", "hm", "yes", []),
    (SOLAR, UNDECIDED, "<|think|>hm<|end|><|begin|>assistant<|content|>yes\n", "hm", "yes\n", []),
    (SOLAR, UNDECIDED, f"<|think|>hm<|end|><|begin|>assistant<|tool_calls|>{SOLAR_CALL}", "hm", "", F),
    (SOLAR, UNDECIDED, "<|content|>yes", "", "yes", []),
    (SOLAR, UNDECIDED, f"<|content|>so<|end|><|begin|>assistant<|tool_calls|>{SOLAR_CALL}", "", "so", F),
    (SOLAR, UNDECIDED, "plain", "", "plain", []),
    (SOLAR_2, OPEN, "hm<|think:end|>yes", "hm", "yes", []),
    (SOLAR_2, OPEN, "hm<|tool_call:start|>f\n<|tool_call:end|>", "hm", "", [("f", "{}")]),
    (APERTUS, UNDECIDED, "<|inner_prefix|>hm<|inner_suffix|>yes", "hm", "yes", []),
    (APERTUS, UNDECIDED, '<|inner_prefix|>hm<|tools_prefix|>[{"f": {"n": 1}}]<|tools_suffix|>', "hm", "", F),
    (APRIEL, OPEN, "1. hm\n[BEGIN FINAL RESPONSE]\nyes\n[END FINAL RESPONSE]", "1. hm", "yes", []),
    (APRIEL, UNDECIDED, "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nyes [a]", "hm", "yes [a]", []),
    (APRIEL, OPEN, 'hm\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{"name": "f", "arguments": {"n": 1}}]</tool_calls>', "hm",
     "", F),
    (APRIEL, OPEN, "hm [BEGIN", "hm [BEGIN", "", []),
    (M3, UNDECIDED, "<mm:think>hm</mm:think>yes", "hm", "yes", []),
    (M3, UNDECIDED, "</mm:think>yes</mm:think>", "", "yes</mm:think>", []),
    (M3, OPEN, 'hm</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<n>1]<]minimax[>['
     "</n>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>", "hm", "", F),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{place} {case[2][:30]}" for place, case in enumerate(CASES)])
def test_reasoning_answers_and_calls_are_split(
    case: tuple[str, ReasoningStart, str, str, str, list[tuple[str, str]]],
) -> None:
    """However the text is cut: markers are in no part, and no text is lost."""
    template, start, text, reasoning, content, calls = case
    form = OutputFormat.detect(template, ("<|open|>",))
    plan = ParsingPlan(form, start, tool_mode="auto", schemas={"f": {"properties": {"n": {"type": "integer"}}}})
    assert read_every_cut(plan, text) == (reasoning, content, calls)
    assert form.shows_special_tokens is (template == K3)
    if not calls:
        assert read_every_cut(ParsingPlan(form, start), text) == (reasoning, content, [])


def test_markers_of_channels_are_no_content_beside_reasoning() -> None:
    """With separate_reasoning false the reasoning is content with its own markers, but without those of the answer."""
    plan = ParsingPlan(OutputFormat.detect(K3, ()), OPEN, separates_reasoning=False)
    assert read_every_cut(plan, f"hm{K3_ANSWER}{K3_END}") == ("", "hm<|close|>think<|sep|>yes", [])


K3_PROMPT = '<|open|>message role="assistant"<|sep|>'


@pytest.mark.parametrize(
    ("template", "beginning", "start"),
    [
        (K3, f"{K3_PROMPT}<|open|>think<|sep|>", OPEN),
        (K3, f"{K3_PROMPT}<|open|>response<|sep|>", CLOSED),
        (SOLAR, "<|begin|>assistant", UNDECIDED),
        (SOLAR, "<|begin|>assistant<|think|><|end|><|begin|>assistant", UNDECIDED),  # the model may reason once more
        (SOLAR_2, "<|think:start|>", OPEN),
        (SOLAR_2, "<|think:start|><|think:end|>", CLOSED),
        (M3, "]~b]ai\n", UNDECIDED),
        (M3, "]~b]ai\n</mm:think>", CLOSED),
        (APRIEL, "<|begin_assistant|>\nHere are my reasoning steps:\n", OPEN),
    ],
)
@pytest.mark.parametrize("ignores_the_flag", [True, False])
def test_where_the_prompt_ends(template: str, beginning: str, start: ReasoningStart, ignores_the_flag: bool) -> None:
    """Also if the template ignores add_generation_prompt, as Apriel's does."""

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        turn = f"reason: {template}<|user|>{messages[0]['content']}<|end_of_turn|>"
        return turn + (beginning if add_generation_prompt or ignores_the_flag else "")

    form = OutputFormat.detect(template, ()).reasoning
    assert form is not None and find_reasoning_start(form, render) is start


def allows_digits(form: ReasoningFormat, start: ReasoningStart, special: tuple[str, ...], text: str) -> bool:
    """Whether the rules for reasoning, with a structure of digits behind them, allow the text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    return allows(Grammar("regex", "[0-9]+", reasoning_rules(form, start, ids)), special, text)


@pytest.mark.parametrize(
    ("template", "special", "start", "good", "bad"),
    [
        (K3, ("<|open|>", "<|close|>", "<|sep|>"), OPEN, "hm<|close|>think<|sep|><|open|>response<|sep|>12",
         "hm<|open|>"),
        (K3, ("<|open|>", "<|close|>", "<|sep|>"), OPEN, "hm<|close|>think<|sep|><|open|>response<|sep|>1",
         "hm<|close|>think<|sep|>12"),
        (K3, ("<|open|>", "<|close|>", "<|sep|>"), CLOSED, "12", "<|open|>response<|sep|>"),
        (SOLAR, (), UNDECIDED, "<|think|>hm<|end|><|begin|>assistant<|content|>12", "<|think|>hm<|end|>12"),
        (SOLAR, (), UNDECIDED, "<|content|>12", "12"),
        (APRIEL, (), OPEN, "hm\n[BEGIN FINAL RESPONSE]\n12", "hm\n[BEGIN FINAL RESPONSE]\nso"),
        (SOLAR_2, ("<|think:start|>", "<|think:end|>"), OPEN, "hm<|think:end|>12", "hm<|think:end|>so"),
    ],
)  # fmt: skip
def test_a_structure_begins_behind_the_reasoning(
    template: str, special: tuple[str, ...], start: ReasoningStart, good: str, bad: str
) -> None:
    """Markers that consist of special tokens and text are matched, and the answer has the start of its channel."""
    form = OutputFormat.detect(template, ()).reasoning
    assert form is not None
    assert allows_digits(form, start, special, good) and not allows_digits(form, start, special, bad)
