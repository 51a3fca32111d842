"""OutputParser: calls as published models write them, with their usual mistakes."""

import json
from typing import Any

import pytest

from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import ParsingPlan
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart
from tests.router.parsing.parsed_text import read_every_cut

F, G = '{"name": "f", "arguments": {"n": 1}}', '{"name": "g", "arguments": {}}'
GOT_F, GOT_G = ("f", '{"n": 1}'), ("g", "{}")
# (what a chat template has, text, content, calls)
MODELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # Nemotron Nano 2 and LongCat-Flash
    ("<TOOLCALL>[", f"so\n<TOOLCALL>[{F}, {G}]</TOOLCALL>", "so", [GOT_F, GOT_G]),
    ("<longcat_tool_call>", f"<longcat_tool_call>\n{F}\n</longcat_tool_call>\n", "", [GOT_F]),
    # Granite 3, InternLM 3, Phi-4 mini, Llama 3
    ("{{ tools }}", f"so<|tool_call|>[{F}, {G}]", "so", [GOT_F, GOT_G]),
    ("{{ tools }}", f"<|tool_call|>{F}<|/tool_call|><|tool_call|>{G}<|/tool_call|>", "", [GOT_F, GOT_G]),
    ("{{ tools }}", f"so<|action_start|><|plugin|>\n{F}<|action_end|>", "so", [GOT_F]),
    ("{{ tools }}", f"functools[{F}, {G}]", "", [GOT_F, GOT_G]),
    ("{{ tools }}", "use functools[0] or functools.partial", "use functools[0] or functools.partial", []),
    ("{{ tools }}", f"{F}\n{G}", "", [GOT_F, GOT_G]),
    ("{{ tools }}", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("{{ tools }}", '[{"name": "Bob"}, {"name": "Al"}]', '[{"name": "Bob"}, {"name": "Al"}]', []),
    ("{{ tools }}", '<|python_tag|>{"name": "g"}', "", [GOT_G]),
    ("{{ tools }}", '{"a": <b>} and {c}', '{"a": <b>} and {c}', []),
    # Cohere's Command A and Command R7B
    ("<|START_ACTION|>", '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}},\n  '
     '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>', "", [GOT_F, GOT_G]),
    # Hunyuan 3
    ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>",
     "so\n<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
     "<tool_call>g<tool_sep></tool_call>\n</tool_calls>", "so", [GOT_F, GOT_G]),
    # Hunyuan-A13B, Jamba and Apriel
    ("<tool_calls>", f"so\n<tool_calls>[{F}, {G}]</tool_calls>", "so", [GOT_F, GOT_G]),
    # LFM2 and Olmo 3
    ("<|tool_call_start|>[", "so<|tool_call_start|>[f(n=1), g()]<|tool_call_end|>wait", "sowait", [GOT_F, GOT_G]),
    ("<|tool_call_start|>[", "<|tool_call_start|>no<|tool_call_end|>", "<|tool_call_start|>no<|tool_call_end|>", []),
    ("<|tool_call_start|>[", "<|tool_call_start|>[f(x='a\nb')]<|tool_call_end|>", "", [("f", '{"x": "a\\nb"}')]),
    ("<|tool_list_start|>", "<|tool_call_start|>[g()]<|tool_call_end|>", "", [GOT_G]),
    ("<|tool_call_start|>[", "a <|tool_cal", "a <|tool_cal", []),
    ("<function_calls>", "<function_calls>\nf(n=1)\ng()\n</function_calls>", "", [GOT_F, GOT_G]),
    # Seed-OSS
    ("<function=", "<seed:tool_call>\n<function=f>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>", "",
     [GOT_F]),
    # DeepSeek V3.2 and V4
    ("<｜DSML｜", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "",
     [GOT_G]),
    # Gemma 4
    ("<|tool_call>call:", "so<|tool_call>call:f{n:1}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>", "so",
     [GOT_F, GOT_G]),
    ("<|tool_call>call:", '<|tool_call>call:f{x:<|"|><tool_call|>, "{<|"|>,n:12}<tool_call|>', "",
     [("f", '{"x": "<tool_call|>, \\"{", "n": 12}')]),
    ("<|tool_call>call:", "<|tool_call>call:f{x:5,y:[true,null,z],w:{a:<|\"|><|\"|>}}<tool_call|>", "",
     [("f", '{"x": "5", "y": [true, null, "z"], "w": {"a": ""}}')]),
    ("<|tool_call>call:", "<|tool_call>call:f{n:}<tool_call|> so", "<|tool_call>call:f{n:}<tool_call|> so", []),
    ("<|tool_call>call:", "<|tool_call>call:f{n:1", "<|tool_call>call:f{n:1", []),
    # Step 3.5, whose template has Qwen3 Coder's calls
    ("<tool_call>\n<function=",
     "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", "", [GOT_F]),
    # Mistral's calls behind one marker, with commas
    ("[TOOL_CALLS]", 'so[TOOL_CALLS]f[ARGS]{"n": 1}, g[ARGS]{}', "so", [GOT_F, GOT_G]),
    ("[TOOL_CALLS]", '[TOOL_CALLS]f{"n": 1},g{}, [TOOL_CALLS]g{}', "", [GOT_F, GOT_G, GOT_G]),
    ("[TOOL_CALLS]", '[TOOL_CALLS]f{"n": 1}, and', ", and", [GOT_F]),
    ("[TOOL_CALLS]", '[TOOL_CALLS]f{"n": 1}, and {so}', ", and {so}", [GOT_F]),
    # Apertus
    ("<|tools_prefix|>", '<|tools_prefix|>[{"f": {"n": 1}}, {"g": null}]<|tools_suffix|> so', " so", [GOT_F, GOT_G]),
    ("<|tools_prefix|>", f"<|tools_prefix|>[{F}]<|tools_suffix|>", "", [GOT_F]),
    ("<|tools_prefix|>", "<|tools_prefix|>[1]<|tools_suffix|>", "<|tools_prefix|>[1]<|tools_suffix|>", []),
    ("<|tools_prefix|>", '<|tools_prefix|>[{"f": 5}]', '<|tools_prefix|>[{"f": 5}]', []),
    ("<|tools_prefix|>", '<|tools_prefix|>[{"f": {"n": NaN}, "a": 1', "", [("f", '{"n": NaN}')]),
    # Solar Open
    ("<|tool_call:begin|>", "<|tool_call:begin|>a<|tool_call:name|>f", "<|tool_call:begin|>a<|tool_call:name|>f", []),
    # Kimi K2 with sections in the singular, and without the number of the call
    ("<|tool_call_begin|>", '<|tool_call_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"n": 1}'
     "<|tool_call_end|><|tool_call_section_end|>", "", [GOT_F]),
    ("<|tool_call_begin|>", '<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>', "",
     [GOT_F]),
]  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"x": {"type": "string"}, "l": {"type": "array"}}}, "g": {},
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS, ids=[f"{case[0]} {place}" for place, case in enumerate(MODELS)])
def test_calls_of_published_models(case: tuple[str, str, str, list[tuple[str, str]]]) -> None:
    """The format that a model's template shows reads its calls, however the text is cut."""
    template, text, content, calls = case
    plan = ParsingPlan(OutputFormat.detect(template, ()), tool_mode="auto", schemas=SCHEMAS)
    assert read_every_cut(plan, text) == ("", content, calls)


M = "]<]minimax[>["
CODER = "<function=f>\n<parameter=n>\n1\n</parameter>\n"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# (format, text, content, calls)
MISTAKES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # A bracket is left out: the call ends at the next marker, and the calls behind it are read.
    ("hermes", f"<tool_call>\n{F[:-1]}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\nso", "so", [GOT_F, GOT_G]),
    ("hermes", f"<tool_call>{F[:-2]}</tool_call>\n<tool_call>{G}</tool_call>", "", [("f", '{"n": 1'), GOT_G]),
    ("hermes", f'<tool_call>{{"arguments": {{}}, "name"</tool_call>\n<tool_call>{G}</tool_call>',
     '<tool_call>{"arguments": {}, "name"</tool_call>', [GOT_G]),
    ("deepseek_v3", f'{BEGIN}f{SEP}{{"n": 1{END}{BEGIN}g{SEP}{{}}{END}', "", [("f", '{"n": 1'), GOT_G]),
    # Arguments that are nothing
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [GOT_G]),
    ("hermes", '<tool_call>{"name": "g", "arguments": ""}</tool_call>', "", [GOT_G]),
    ("openai", "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>", "", [GOT_G]),
    # gpt-oss without "functions."
    ("openai", "<|channel|>commentary to=g <|constrain|>json<|message|>{}<|call|>", "", [GOT_G]),
    # Text between the arguments, and ends that are missing
    ("qwen3_coder", f"<tool_call>\n{CODER}</tool_call>\n<tool_call>\n{CODER}</function>\n</tool_call>", "",
     [GOT_F, GOT_F]),
    ("qwen3_coder", f"{CODER}and </function> so", " so", [GOT_F]),
    ("qwen3_coder", "<function=g>\n{}\n</function>\n</tool_call>", "", [GOT_G]),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value><tool_call>g</tool_call>", "", [GOT_F, GOT_G]),
    # The end tag of an argument is missing: it ends at the next argument on a line of its own, or at the call's end.
    ("qwen3_coder", "<function=f>\n<parameter=x>\na\n<parameter=n>\n1\n</function>\n</tool_call> so", " so",
     [("f", '{"x": "a", "n": 1}')]),
    ("qwen3_coder", "<function=f>\n<parameter=n>\n1\n</function>", "", [GOT_F]),
    ("minimax_m2", '<invoke name="f">\n<parameter name="n">1\n</invoke>\n</minimax:tool_call>', "", [GOT_F]),
    ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>a<arg_key>n</arg_key><arg_value>1</tool_call>", "",
     [("f", '{"x": "a", "n": 1}')]),
    ("step3", '<steptml:invoke name="f"><steptml:parameter name="n">1</steptml:invoke><｜tool_call_end｜>', "",
     [GOT_F]),
    # A value that mentions tags
    ("qwen3_coder", "<function=f><parameter=x>a </function> b <parameter=n> c\n<parameter= d</parameter></function>",
     "", [("f", '{"x": "a </function> b <parameter=n> c\\n<parameter= d"}')]),
    ("qwen3_coder", f"<function=f><parameter=x></function>{' ' * 600}</tool_call></parameter></function>", "",
     [("f", json.dumps({"x": f"</function>{' ' * 600}</tool_call>"}))]),
    # The call's end tag is missing where the text ends; an argument that is cut has no value.
    ("qwen3_coder", "<function=g>", "", [GOT_G]),
    ("qwen3_coder", f"{CODER}</func", "", [GOT_F]),
    ("qwen3_coder", f"{CODER}<parameter=x>a", "", [("f", '{"n": 1')]),
    # MiniMax M3: end tags are missing, a name occurs twice, text beside tags, markers that begin no call
    ("minimax_m3", '@<invoke name="f">@<n>1@</invoke>@<invoke name="f">@<n>1@<invoke name="g">'.replace("@", M), "",
     [GOT_F, GOT_F, GOT_G]),
    ("minimax_m3", '@<invoke name="f">@<y>@<k>1@</k>@<k>2@</k>@</y>@</invoke>'.replace("@", M), "",
     [("f", '{"y": {"k": [1, 2]}}')]),
    ("minimax_m3", '@<invoke name="f">@<x>a @<k>b@</k>@</x>@</invoke>'.replace("@", M), "",
     [("f", json.dumps({"x": f"a {M}<k>b{M}</k>"}))]),
    ("minimax_m3", '@<invoke name="f">@<x>a @ b@foo c@</x>@</invoke>'.replace("@", M), "",
     [("f", json.dumps({"x": f"a {M} b{M}foo c"}))]),
    ("minimax_m3", f"a {M} b {M}<foo> c {M}<invo", f"a {M} b {M}<foo> c {M}<invo", []),
    ("minimax_m3", '@<invoke name="f">@<n>1'.replace("@", M), "", [("f", "")]),
    ("minimax_m3", '@<invoke name="f">@<l>@</l>@<x>@</x>@</invoke>'.replace("@", M), "",
     [("f", '{"l": [], "x": ""}')]),
    ("minimax_m3", "@<invoke name=>x@</invoke>".replace("@", M), "@<invoke name=>x@</invoke>".replace("@", M), []),
    # White space around a comma that no call follows
    ("minimax", f"<tool_calls>{G} \n ,\n <b>", " \n ,\n <b>", [GOT_G]),
    # A bracket too many
    ("hermes", f"<tool_call>\n{G}}}\n</tool_call>\nso", "so", [GOT_G]),
    # A function without a name
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
    ("qwen3_coder", "<function= ></function>", "<function= ></function>", []),
    # An answer that ends like the beginning of a call
    ("qwen3_coder", "<", "<", []),
    ("qwen3_coder", f"{CODER}</function>\n<tool", "\n<tool", [GOT_F]),
    ("glm45", " <tool", " <tool", []),
]  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES, ids=[f"{case[0]} {place}" for place, case in enumerate(MISTAKES)])
def test_a_mistake_loses_no_other_call_and_no_text(case: tuple[str, str, str, list[tuple[str, str]]]) -> None:
    """Calls with the mistakes that models make end where the model has ended them."""
    form, text, content, calls = case
    plan = ParsingPlan(OutputFormat(form), tool_mode="auto", schemas=SCHEMAS)
    assert read_every_cut(plan, text) == ("", content, calls)


def test_text_in_a_call_is_not_held() -> None:
    """A model that writes text without end where an argument should be does not fill the memory."""
    plan = ParsingPlan(OutputFormat("qwen3_coder"), tool_mode="auto")
    text = f"<function=f>{'junk <parameter=> ' * 200}<parameter=n>1</parameter></function>"
    assert read_every_cut(plan, text[:900])[2] == [("f", "")]
    assert read_every_cut(plan, text[:20] + text[-500:])[2] == [GOT_F]


@pytest.mark.parametrize(
    ("text", "start", "wanted"),
    [
        ("<|channel>thought\nhm\n<channel|>yes", ReasoningStart.UNDECIDED, ("hm", "yes", [])),
        ("yes", ReasoningStart.CLOSED, ("", "yes", [])),
        ("<|channel>thought\nhm<channel|><|tool_call>call:f{n:1}<tool_call|>", ReasoningStart.UNDECIDED,
         ("hm", "", [GOT_F])),
        ("<|channel>thought", ReasoningStart.UNDECIDED, ("", "<|channel>thought", [])),
    ],
)  # fmt: skip
def test_reasoning_of_gemma(text: str, start: ReasoningStart, wanted: tuple[str, str, list[tuple[str, str]]]) -> None:
    """The name of the channel is no reasoning, and a template's empty channel closes the reasoning."""
    template = "<|tool_call>call: {{- '<|channel>thought\\n<channel|>' -}}"
    form = OutputFormat.detect(template, {"<|channel>"})
    assert form.reasoning == ReasoningFormat("<|channel>", "<channel|>", "thought") and form.shows_special_tokens
    assert read_every_cut(ParsingPlan(form, start, tool_mode="auto", schemas=SCHEMAS), text) == wanted
