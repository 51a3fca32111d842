"""UnclosedReasoning: a call of a model that has not ended its reasoning is a call."""

import pytest

from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.parsing.parts import Reasoning
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart
from tests.router.parsing.parsed_text import read_every_cut

THINK = ReasoningFormat("<think>", "</think>")
GOT = [("f", '{"n": 1}')]
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "pythonic": "<|tool_call_start|>[f(n=1)]<|tool_call_end|>",
}


@pytest.mark.parametrize("form", CALLS)
def test_a_call_ends_reasoning_that_is_never_ended(form: str) -> None:
    """Text before the call is reasoning. If the reasoning ends after the call, the call is a thought."""
    open_plan = ParsingPlan(OutputFormat(form, THINK), ReasoningStart.OPEN, tool_mode="auto")
    assert read_every_cut(open_plan, f"hm <b>\n\n{CALLS[form]}\n") == ("hm <b>\n\n", "", GOT)
    thought = f"hm {CALLS[form]} no"
    assert read_every_cut(open_plan, f"{thought}\n</think>\n\nyes {CALLS[form]}") == (thought, "yes ", GOT)
    assert read_every_cut(open_plan, thought.removesuffix(" no") + CALLS[form])[2] == GOT * 2


def test_a_marker_alone_is_reasoning() -> None:
    """A model that writes about a marker is still thinking, and without tools a call is a thought."""
    plan = ParsingPlan(OutputFormat("hermes", THINK), ReasoningStart.OPEN, tool_mode="auto")
    for text in (
        "a <tool_call> b <tool_call>\n",
        "a <tool_call>[] {",
        '<tool_call>! {"name"',
        '<tool_call>\n{"name": 5}',
        "<tool_c",
    ):
        assert read_every_cut(plan, text) == (text.rstrip(), "", [])
    plain = ParsingPlan(OutputFormat("hermes", THINK), ReasoningStart.OPEN, tool_mode="none")
    assert read_every_cut(plain, CALLS["hermes"]) == (CALLS["hermes"], "", [])


def test_only_what_may_be_a_call_is_held() -> None:
    """Reasoning behind a marker that begins no call is streamed at once."""
    parser = OutputParser(ParsingPlan(OutputFormat("hermes", THINK), ReasoningStart.OPEN, tool_mode="auto"))
    assert parser.feed("a <tool_call>") == [Reasoning("a ")]
    assert parser.feed(" is a marker") == [Reasoning("<tool_call> is a marker")]
    assert parser.feed(CALLS["hermes"][:-3]) == []
    assert parser.feed(" no</think>") == [Reasoning(CALLS["hermes"][:-3] + " no")]
