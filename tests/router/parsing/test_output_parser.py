"""OutputParser: reasoning, content and calls of every format do not depend on how the text was cut into pieces."""

import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.setting_names import ToolParserName
from coatcheck.router.parsing.output_format import TOOL_FORMATS, OutputFormat, find_reasoning_start
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan, ToolMode
from coatcheck.router.parsing.parts import Content, Reasoning
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart
from coatcheck.router.parsing.xml_tool_parser import XmlCallFormat
from tests.router.parsing.parsed_text import read

SCHEMAS = {"f": {"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}}
THINK = ReasoningFormat("<think>", "</think>")


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


CALL = '{"name": "f", "arguments": {"x": "</b> \\" }"}}'
ARGUMENTS = '{"x": "</b> \\" }"}'
F = ("f", ARGUMENTS)
SPACED = '{ "name" : "f","arguments":{"n":1} , "id": "[}" }'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>".replace("{}", ARGUMENTS)
V31 = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
XML = "<function=f>\n<parameter=x>\na\nb\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>"
GLM = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
M2 = '<invoke name="f">\n<parameter name="x">12</parameter>\n<parameter name="o">{"a": [1]}</parameter>\n</invoke>'
DSML = (
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="o" string="true">12</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
GOT_XML = ("f", '{"x": "a\\nb", "n": 7}')
GOT_GLM = ("f", '{"x": "12", "n": 7}')
M3 = (
    '@<tool_call>\n@<invoke name="f">@<x>12@</x>@<n>7@</n>@<l>@<item>@<a>b\n@</a>@</item>@</l>@</invoke>\n'
    '@<invoke name="f">@</invoke>\n@</tool_call>'
).replace("@", "]<]minimax[>[")
GOT_M3 = ("f", '{"x": "12", "n": 7, "l": [{"a": "b\\n"}]}')
K3 = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>12\n'
    '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="f" index="2"<|sep|><|open|>json type="object"<|sep|>{"n": 1}<|close|>json<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
STEP = (
    '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
    '<steptml:parameter name="x">12</steptml:parameter>\n<steptml:parameter name="n">7</steptml:parameter>\n'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
)
SOLAR = f"<|tool_call:begin|>a1b2<|tool_call:name|>f<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
SOLAR_2 = (
    "<|tool_call:start|>f\n<|tool_arg:start|>x<|tool_arg:value|>12<|tool_arg:end|>\n"
    "<|tool_arg:start|>n<|tool_arg:value|>7<|tool_arg:end|>\n<|tool_call:end|>"
)
HARMONY_CALL = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}"
# (format, text, content, calls)
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"so <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> end", "so  end", [F, F]),
    ("hermes", f"so\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{SPACED}", "so", [F, ("f", '{"n":1}')]),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [F, F]),
    ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', "", [("f", '{"n": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a\n<b> \n\nc\n", "a\n<b> \n\nc\n", []),
    ("hermes", "<tool_call>not json</tool_call>!", "<tool_call>not json</tool_call>!", []),
    ("hermes", '<tool_call>{"arguments": 1}</tool_call>', '<tool_call>{"arguments": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"x": [1', '<tool_call>{"x": [1', []),
    ("llama3_json", CALL, "", [F]),
    ("llama3_json", f"[{CALL}, {CALL}]", "", [F, F]),
    ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [F, F]),
    ("llama3_json", f"so <|python_tag|>{CALL}", "so ", [F]),
    ("llama3_json", '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}', "", [("f", '{"n": 1}')]),
    ("llama3_json", '{"other": 1}', '{"other": 1}', []),
    ("llama3_json", f"see {CALL}", f"see {CALL}", []),
    ("llama3_json", "[1] says", "[1] says", []),
    ("llama3_json", " " + "[" * 3000, " " + "[" * 3000, []),
    ("llama3_json", "", "", []),
    ("mistral", f"so[TOOL_CALLS][{CALL}, {CALL}]", "so", [F, F]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]f{ARGUMENTS}", "", [F, F]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", "", [F]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("deepseek_v3", f"so<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", "so", [F, F]),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>", "", [F, F]),
    ("kimi_k2", f"so <|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>", "so ", [F, F]),
    ("minimax", f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", "", [F, F]),
    ("minimax_m2", f"so\n<minimax:tool_call>\n{M2}\n</minimax:tool_call>", "so",
     [("f", '{"x": "12", "o": {"a": [1]}}')]),
    ("qwen3_coder", f"so\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML}\n</tool_call>", "so",
     [GOT_XML, GOT_XML]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    ("qwen3_coder", "a < b", "a < b", []),
    ("glm45", f"so\n{GLM}</tool_call>\n{GLM}</tool_call>", "so", [GOT_GLM, GOT_GLM]),
    ("glm45", "<tool_call>f\n</tool_call>", "", [("f", "{}")]),
    ("pythonic", "[f(x='a', n=[1, {'k': None}]), a.g(y=True, z=false)]", "",
     [("f", '{"x": "a", "n": [1, {"k": null}]}'), ("a.g", '{"y": true, "z": false}')]),
    ("pythonic", "<|python_start|>[f(n=-1)]<|python_end|>", "", [("f", '{"n": -1}')]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(open('x'))]", "[f(open('x'))]", []),
    ("pythonic", "[see](x)", "[see](x)", []),
    ("gemma4", 'so\n<|tool_call>call:f{x:<|"|>12<|"|>,o:{a:[1,<|"|>}<|"|>]}}<tool_call|>', "so",
     [("f", '{"x": "12", "o": {"a": [1, "}"]}}')]),
    ("deepseek_v32", f"so\n\n<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>", "so",
     [("f", '{"o": "12", "n": 7}')]),
    ("minimax_m3", f"so\n{M3}", "so", [GOT_M3, ("f", "{}")]),
    ("kimi_k3", f"so{K3}", "so", [("f", '{"x": "12\\n", "n": 7}'), ("f", '{"n": 1}')]),
    ("step3", f"so\n{STEP}", "so", [GOT_GLM]),
    ("solar_open", f"so<|tool_calls|>{SOLAR}{SOLAR}", "so", [F, F]),
    ("solar_open2", f"so{SOLAR_2}\n{SOLAR_2}", "so", [GOT_GLM, GOT_GLM]),
    ("apertus", f'so<|tools_prefix|>[{{"f": {ARGUMENTS}}}, {{"g": {{}}}}]<|tools_suffix|>', "so", [F, ("g", "{}")]),
    ("openai", f"{HARMONY_CALL}<|call|>", "", [F]),
    ("openai", f"<|channel|>final<|message|>so<|end|><|start|>assistant{HARMONY_CALL}", "so", [F]),
    ("openai", f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}", "", [F]),
    ("openai", "<|channel|>commentary to=browser.search<|message|>x<|end|>", "", []),
    ("openai", "plain text", "plain text", []),
    ("openai", "assistant professors teach", "assistant professors teach", []),
    ("openai", "assistant", "assistant", []),
    ("openai", " commentary to the text <b>", " commentary to the text <b>", []),
    ("openai", "to=do lists", "to=do lists", []),
    ("openai", f"assistant{HARMONY_CALL}", "", [F]),
    ("openai", "assistant<|channel|>analysis", "", []),
]  # fmt: skip


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_of_every_format(case: tuple[str, str, str, list[tuple[str, str]]], cuts: list[int]) -> None:
    """Calls and the text around them are the same for any pieces."""
    name, text, content, calls = case
    plan = ParsingPlan(OutputFormat(name), tool_mode="auto", schemas=SCHEMAS)
    assert read(plan, cut(text, cuts)) == ("", content, calls)


def test_every_case_in_single_characters() -> None:
    """No character is held back for good, and no format is without a case."""
    for name, text, content, calls in CASES:
        plan = ParsingPlan(OutputFormat(name), tool_mode="auto", schemas=SCHEMAS)
        assert read(plan, list(text)) == ("", content, calls), (name, text)
        assert read(plan, [text]) == ("", content, calls), (name, text)
    assert {case[0] for case in CASES} == TOOL_FORMATS.keys()


WORDS = (
    "<think>", "</think>", "{", "}", "[", "]", '"', ",", ":", " ", "\n", "a", "<", "f", "call:f", "f(x=1)", "final",
    CALL, " to=functions.f", "analysis", "commentary", "assistant", "functions.f:0",
)  # fmt: skip


@given(form=st.sampled_from(sorted(TOOL_FORMATS)), start=st.sampled_from(ReasoningStart), data=st.data())
def test_any_text_is_the_same_in_pieces(form: str, start: ReasoningStart, data: st.DataObject) -> None:
    """Markers in any order, and in any pieces, give the same reasoning, content and calls."""
    calls = TOOL_FORMATS[form]
    tags = [calls.argument_start, calls.key_end, calls.argument_end] if isinstance(calls, XmlCallFormat) else []
    text = "".join(data.draw(st.lists(st.sampled_from([*WORDS, *calls.markers, *tags]), max_size=12)))
    reasoning = THINK if data.draw(st.booleans()) and form != "openai" else None
    plan = ParsingPlan(OutputFormat(form, reasoning), start, tool_mode="auto", schemas=SCHEMAS)
    whole = read(plan, [text])
    assert read(plan, list(text)) == whole
    assert read(plan, cut(text, data.draw(st.lists(st.integers(0, 99), max_size=3)))) == whole


CUT: list[tuple[str, list[tuple[str, str]]]] = [
    ("[", []),
    ('[{"name": "f', []),
    ('[{"name": "f", "arguments": {', [("f", "{")]),
    ('[{"name": "f \\"", "arguments": {"x": "</', [('f "', '{"x": "</')]),
    (f"[{CALL[:-1]}", [F]),
    (f"[{CALL}", [F]),
    (f"[{CALL}, ", [F]),
    (f'[{CALL}, {{"name": "g", "arguments": {{"y": [1', [F, ("g", '{"y": [1')]),
]


@given(case=st.sampled_from(CUT), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_a_list_that_is_cut_has_the_calls_that_had_begun(
    case: tuple[str, list[tuple[str, str]]], cuts: list[int]
) -> None:
    """If calls are required, nothing is content: the last call has the part of its arguments that was generated, and
    has_complete_calls is False."""
    text, calls = case
    plan = ParsingPlan(tool_mode="required")
    assert read(plan, cut(text, cuts)) == ("", "", calls)
    parser = OutputParser(plan)
    parser.feed(text)
    parser.finish()
    assert not parser.has_complete_calls


@pytest.mark.parametrize(
    ("mode", "text", "wanted"),
    [
        ("required", f"[{CALL}, {CALL}]", ("", "", [F, F])),
        ("required", "", ("", "", [])),
        ("required", "see", ("", "see", [])),
        ("named", '{"x": 1}', ("", "", [("g", '{"x": 1}')])),
        ("none", f"<tool_call>{CALL}</tool_call>", ("", f"<tool_call>{CALL}</tool_call>", [])),
    ],
)
def test_other_tool_choices(mode: ToolMode, text: str, wanted: object) -> None:
    """Required calls are a list, a named call is arguments alone, and without tools all text is content."""
    plan = ParsingPlan(OutputFormat("hermes"), tool_mode=mode, named_function="g")
    assert read(plan, [text]) == read(plan, list(text)) == wanted


def test_arguments_come_while_they_are_generated() -> None:
    """The name comes first, and each piece of the arguments as soon as it is generated."""
    parser = OutputParser(ParsingPlan(OutputFormat("hermes"), tool_mode="auto"))
    assert not parser.feed('<tool_call>\n{"name": "f", "arguments"')
    (first,) = parser.feed(': {"x')
    assert (first.name, first.arguments, first.index) == ("f", '{"x', 0) and first.id.startswith("call_")  # type: ignore[union-attr]
    (second,) = parser.feed('": 1')
    assert (second.name, second.id, second.arguments) == ("", "", '": 1')  # type: ignore[union-attr]
    assert not parser.has_complete_calls or parser.finish() == []


def test_at_most_so_many() -> None:
    """Without parallel calls only the first call is returned."""
    plan = ParsingPlan(OutputFormat("llama3_json"), tool_mode="auto", max_calls=1)
    assert read(plan, [f"[{CALL}, {CALL}]"]) == ("", "", [F])


def test_the_id_of_a_kimi_call_is_its_own() -> None:
    """Kimi K2's template writes the ids that the model has made, so they are kept."""
    parser = OutputParser(ParsingPlan(OutputFormat("kimi_k2"), tool_mode="auto"))
    assert parser.feed(KIMI)[0].id == "functions.f:0"  # type: ignore[union-attr]


OPEN, CLOSED, UNDECIDED = ReasoningStart.OPEN, ReasoningStart.CLOSED, ReasoningStart.UNDECIDED
REASONING: list[tuple[ReasoningStart, str, str, str]] = [
    (UNDECIDED, "<think>\nhm\n\nso\n</think>\n\nyes <think>", "hm\n\nso", "yes <think>"),
    (UNDECIDED, "\n<think></think>yes", "", "yes"),
    (UNDECIDED, "yes</think>", "", "yes</think>"),
    (UNDECIDED, "</think>\nyes</think>", "", "yes</think>"),
    (UNDECIDED, "</thi", "", "</thi"),
    (OPEN, "</think>yes", "", "yes"),
    (UNDECIDED, "<think>hm", "hm", ""),
    (UNDECIDED, "<thin", "", "<thin"),
    (UNDECIDED, " yes", "", " yes"),
    (OPEN, "hm </thi</think>yes", "hm </thi", "yes"),
    (OPEN, "<think>hm</think>yes", "hm", "yes"),
    (OPEN, "hm", "hm", ""),
    (CLOSED, "<think>hm</think>", "", "<think>hm</think>"),
    (UNDECIDED, "", "", ""),
]


@given(case=st.sampled_from(REASONING), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_reasoning_is_split_off(case: tuple[ReasoningStart, str, str, str], cuts: list[int]) -> None:
    """Markers and the space next to them are in neither part; whether reasoning has begun is known from the prompt."""
    start, text, reasoning, content = case
    plan = ParsingPlan(OutputFormat("hermes", THINK), start)
    assert read(plan, cut(text, cuts)) == (reasoning, content, [])


def test_calls_come_after_reasoning() -> None:
    """A call in the reasoning is reasoning; include_reasoning and separate_reasoning hide or keep it."""
    call = f"<tool_call>{CALL}</tool_call>"
    text = f"<think>{call}</think>{call}"
    form: dict[str, Any] = dict(output_format=OutputFormat("hermes", THINK), tool_mode="auto")
    assert read(ParsingPlan(**form), list(text)) == (call, "", [F])
    assert read(ParsingPlan(**form, shows_reasoning=False), list(text)) == ("", "", [F])
    assert read(ParsingPlan(**form, separates_reasoning=False), list(text)) == ("", "<think></think>", [F, F])


def test_harmony_has_channels() -> None:
    """Analysis is reasoning, final is content, and with tool_choice required the final channel is a list of calls."""
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
    form = OutputFormat("openai")
    assert read(ParsingPlan(form), list(text + "yes")) == ("hm", "yes", [])
    assert read(ParsingPlan(form, tool_mode="required"), list(f"{text}[{CALL}]")) == ("hm", "", [F])
    assert read(ParsingPlan(form, tool_mode="auto"), list(f"{text}yes")) == ("hm", "yes", [])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("{{ tools }}", "llama3_json"),
        ("[func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<minimax:tool_call><invoke name=", "minimax_m2"),
        ("<tool_calls>", "minimax"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>final", "openai"),
        ("{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token ~ '<tool_call>' }}", "minimax_m3"),
        ("{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}", "kimi_k3"),
        ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", "step3"),
        ("<|tool_calls|><|tool_call:begin|>", "solar_open"),
        ("<|tool_call:start|>", "solar_open2"),
        ("<|tools_prefix|>[", "apertus"),
    ],
)
def test_the_template_says_how_calls_look(source: str, name: str) -> None:
    """A model writes calls in the format of its chat template."""
    assert OutputFormat.detect(source, ()).tool_format == name
    assert OutputFormat.detect(source, (), "mistral").tool_format == "mistral"


def test_reasoning_is_detected_with_its_markers() -> None:
    """Markers that are special tokens must stay in the text; an unknown parser is refused with all that there are."""
    form = OutputFormat.detect("<think> </think> <tool_call>", {"</think>"})
    assert (form.reasoning, form.shows_special_tokens, form.has_reasoning) == (THINK, True, True)
    assert not OutputFormat.detect("<think> </think>", ()).shows_special_tokens
    assert OutputFormat.detect("{{ messages }}", ()).reasoning is None
    with pytest.raises(InvalidConfig, match="tool_parser is 'gpt'; it must be auto or one of hermes, llama3_json"):
        OutputFormat.detect("", (), "gpt")


@pytest.mark.parametrize(
    ("beginning", "start"), [("<a>", UNDECIDED), ("<a><think>\n", OPEN), ("<a><think>\n\n</think>\n\n", CLOSED)]
)
def test_the_prompt_says_whether_reasoning_has_begun(beginning: str, start: ReasoningStart) -> None:
    """Only what add_generation_prompt adds counts, not the instructions before it."""

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return f"think in <think></think> {json.dumps(messages)}" + (beginning if add_generation_prompt else "")

    assert find_reasoning_start(THINK, render) is start


def test_serve_has_every_format() -> None:
    """--tool-parser takes auto and every format."""
    assert set(get_args(ToolParserName)) == {"auto", *TOOL_FORMATS}


@pytest.mark.parametrize("text", ["\n", "a\n", "<think>a\n", "<tool_call>", "[TOOL_CALLS]f", "{"])
@pytest.mark.parametrize("form", sorted(set(TOOL_FORMATS) - {"pythonic"}))
def test_white_space_without_end_is_not_held(form: str, text: str) -> None:
    """Of white space that a model writes without end, a bounded number of characters is held back: what is held is
    searched again with each piece. An object that is no call yet is held, but not searched again."""
    parser = OutputParser(ParsingPlan(OutputFormat(form, THINK), tool_mode="auto"))
    parser.feed(text)
    for _ in range(1000):
        parser.feed("\n \n\n")
    held = sum(len(part.text) for part in parser.finish() if isinstance(part, Reasoning | Content))
    assert held <= 1200 or text.startswith("{")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", "[TOOL_CALLS]f" + " " * 100_000),
        ("glm45", "<tool_call>f<arg_key>" + "</arg_key><arg_value>" * 10_000),
        ("deepseek_v3", "<｜tool▁call▁begin｜>" * 10_000),
        ("qwen3_coder", "<function=f><parameter=x>" + "a" * 200_000),
        ("qwen3_coder", "<function=f><parameter=x>" + "\n<parameter=</function>" * 10_000 + "x"),
        ("minimax_m3", "]<]minimax[>[<invoke name=f>" + "]<]minimax[>[<a>" * 3_000),
        ("minimax_m3", "]<]minimax[>[<invoke name=f>]<]minimax[>[<a>" + "]<]minimax[>[" * 10_000),
        ("mistral", '[TOOL_CALLS]f{"x": 1' + ",f" * 50_000),
    ],
)
def test_hostile_text_takes_linear_time(form: str, text: str) -> None:
    """Half-written calls are read in seconds, whole and in pieces, and not in minutes; no call is complete."""
    for size in (len(text), 5):
        parser = OutputParser(ParsingPlan(OutputFormat(form), tool_mode="auto"))
        for at in range(0, len(text), size):
            parser.feed(text[at : at + size])
        parser.finish()
        assert not parser.has_complete_calls


def test_names_that_are_no_json_are_content() -> None:
    """A name with an escape that JSON does not have begins no call, and fails no request."""
    text = '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>'
    assert read(ParsingPlan(OutputFormat("hermes"), tool_mode="auto"), [text])[2] == []


def test_numbers_that_json_lacks() -> None:
    """NaN and infinity, which Python's parser of JSON takes, do not get into arguments."""
    call = "<function=f><parameter=n>{}</parameter></function>"
    for number in ("NaN", "-Infinity", "1e999"):
        plan = ParsingPlan(OutputFormat("qwen3_coder"), tool_mode="auto", schemas=SCHEMAS)
        assert read(plan, [call.replace("{}", number)])[2] == [("f", f'{{"n": "{number}"}}')]
    assert read(ParsingPlan(OutputFormat("pythonic"), tool_mode="auto"), ["[f(n=1e999)]"])[2] == []
    late = '<tool_call>{"arguments": {"n": NaN}, "name": "f"}</tool_call>'
    assert read(ParsingPlan(OutputFormat("hermes"), tool_mode="auto"), [late])[2] == []
