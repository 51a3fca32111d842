"""OutputFormat: how a model writes reasoning and tool calls, detected from its chat template.

A model writes tool calls in the form in which its template shows earlier calls. Names of tool formats are vLLM's.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.parsing.answer_tags import TAGS
from coatcheck.router.parsing.gemma_tool_parser import END as GEMMA_END
from coatcheck.router.parsing.gemma_tool_parser import QUOTE, RESPONSE
from coatcheck.router.parsing.gemma_tool_parser import START as GEMMA_START
from coatcheck.router.parsing.harmony_parser import MARKERS as HARMONY_MARKERS
from coatcheck.router.parsing.json_tool_parser import JsonCallFormat
from coatcheck.router.parsing.minimax_tool_parser import MARK as MINIMAX_MARK
from coatcheck.router.parsing.minimax_tool_parser import OPENINGS as MINIMAX_OPENINGS
from coatcheck.router.parsing.pythonic_tool_parser import MARKERS as PYTHONIC_MARKERS
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart, has_token
from coatcheck.router.parsing.xml_tool_parser import XmlCallFormat


@dataclass(frozen=True, slots=True)
class PythonicCallFormat:
    """See PythonicToolParser."""

    markers: tuple[str, ...] = (*PYTHONIC_MARKERS, *PYTHONIC_MARKERS.values())
    openings: tuple[str, ...] = tuple(PYTHONIC_MARKERS)


@dataclass(frozen=True, slots=True)
class GemmaCallFormat:
    """See GemmaToolParser."""

    markers: tuple[str, ...] = (GEMMA_START, GEMMA_END, QUOTE, RESPONSE)
    openings: tuple[str, ...] = (GEMMA_START,)


@dataclass(frozen=True, slots=True)
class MinimaxCallFormat:
    """See MinimaxToolParser."""

    markers: tuple[str, ...] = (MINIMAX_MARK, *MINIMAX_OPENINGS)
    openings: tuple[str, ...] = MINIMAX_OPENINGS


@dataclass(frozen=True, slots=True)
class HarmonyCallFormat:
    """See HarmonyParser."""

    markers: tuple[str, ...] = HARMONY_MARKERS
    openings: tuple[str, ...] = ()  # a call is a message of its own


CallFormat = (
    JsonCallFormat | XmlCallFormat | PythonicCallFormat | GemmaCallFormat | MinimaxCallFormat | HarmonyCallFormat
)

JSON_MARKERS: Final = ("<|python_tag|>", "<|tool_call|>", "<|plugin|>", "<|START_ACTION|>", "functools[")
# The markers around Kimi K3's answer.
_K3_ANSWER: Final = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_NAME: Final = r"(?P<name>[A-Za-z0-9_.-]{1,128})"
TOOL_FORMATS: Final[dict[str, CallFormat]] = {
    # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; other tags: Nemotron's and LongCat's
    "hermes": JsonCallFormat(
        triggers=("<tool_call>", "<TOOLCALL>", "<longcat_tool_call>"),
        wrapped=re.compile(r"<(?:tool_call|TOOLCALL|longcat_tool_call)>\s*\[?\s*"),
        closers=("]", "}", "</tool_call>", "</TOOLCALL>", "</longcat_tool_call>"),
        separators=(",",),
    ),
    # {"name": ..., "parameters": {...}}, or several of them, as all of the text or after a marker: <|python_tag|>,
    # Granite 3's <|tool_call|>, InternLM's <|plugin|>, Cohere's <|START_ACTION|>, or Phi-4 mini's functools[
    "llama3_json": JsonCallFormat(
        triggers=JSON_MARKERS,
        starts_text=True,
        wrapped=re.compile(rf"\s*(?:{'|'.join(map(re.escape, JSON_MARKERS[:-1]))}|functools(?=\[))?\s*\[?\s*"),
        closers=("]", "<|/tool_call|>", "<|action_end|>", "<|END_ACTION|>"),
        separators=(",", ";", ""),
        dropped=("<|action_start|>",),
    ),
    # [f(x=1), g(y="z")]
    "pythonic": PythonicCallFormat(),
    # [TOOL_CALLS][{"name": ..., "arguments": {...}}], or since Tekken v11 [TOOL_CALLS]f[ARGS]{...}
    "mistral": JsonCallFormat(
        triggers=("[TOOL_CALLS]",),
        bare=(re.compile(rf"\[TOOL_CALLS\]\s*{_NAME}\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?=\{{)"),),
        wrapped=re.compile(r"\[TOOL_CALLS\]\s*\[?\s*(?=\{)"),
        closers=("]",),
        separators=(",",),
        following=re.compile(rf",\s*(?:(?=\[TOOL_CALLS\])|{_NAME}(?:\[ARGS\])?(?=\{{))"),
        dropped=("[ARGS]", "[CALL_ID]"),
    ),
    # V3: ...function<｜tool▁sep｜>f\n```json\n{...}\n```...; V3.1: ...f<｜tool▁sep｜>{...}...
    "deepseek_v3": JsonCallFormat(
        triggers=("<｜tool▁call▁begin｜>",),
        bare=(
            re.compile(rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\s*(?=\{{)"),
            re.compile(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>\s*(?=\{{)"),
        ),
        closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    ),
    # <｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">1</｜DSML｜parameter></｜DSML｜invoke>
    "deepseek_v32": XmlCallFormat(
        call_start='<｜DSML｜invoke name="',
        name_end='">',
        argument_start='<｜DSML｜parameter name="',
        key_end='">',
        argument_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        dropped=tuple(f"<{slash}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/")),
        type_attribute="string",
    ),
    # <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
    # <steptml:parameter name="x">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>
    "step3": XmlCallFormat(
        call_start='<steptml:invoke name="',
        name_end='">',
        argument_start='<steptml:parameter name="',
        key_end='">',
        argument_end="</steptml:parameter>",
        call_end="</steptml:invoke>",
        dropped=(
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>function<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
    ),
    # <|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>1<|close|>argument<|sep|>
    # <|close|>call<|sep|>
    "kimi_k3": XmlCallFormat(
        call_start='<|open|>call tool="',
        name_end='"<|sep|>',
        index_attribute="index",
        argument_start='<|open|>argument key="',
        key_end='"<|sep|>',
        type_attribute="type",
        argument_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|>",
        object_start='<|open|>json type="object"<|sep|>',
        object_end="<|close|>json<|sep|>",
        dropped=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", *_K3_ANSWER),
    ),
    # <|tool_call:start|>f\n<|tool_arg:start|>x<|tool_arg:value|>1<|tool_arg:end|>\n<|tool_call:end|>
    "solar_open2": XmlCallFormat(
        call_start="<|tool_call:start|>",
        name_end="",
        argument_start="<|tool_arg:start|>",
        key_end="<|tool_arg:value|>",
        argument_end="<|tool_arg:end|>",
        call_end="<|tool_call:end|>",
    ),
    # <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    "kimi_k2": JsonCallFormat(
        triggers=("<|tool_call_begin|>",),
        bare=(
            re.compile(
                rf"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?{_NAME}:\d+)\s*"
                r"<\|tool_call_argument_begin\|>\s*(?=\{)"
            ),
            re.compile(rf"<\|tool_call_begin\|>(?:functions\.)?{_NAME}\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"),
        ),
        # Some checkpoints write tool_call_section in place of tool_calls_section.
        closers=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        dropped=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_section_begin|>",
            "<|tool_call_section_end|>",
            "<|tool_call_argument_begin|>",
        ),
    ),
    # <tool_calls>\n{"name": ..., "arguments": {...}}\n</tool_calls>, or with a list: Hunyuan's, Jamba's and Apriel's
    "minimax": JsonCallFormat(
        triggers=("<tool_calls>",),
        wrapped=re.compile(r"<tool_calls>\s*\[?\s*"),
        closers=("]", "</tool_calls>"),
        separators=(",", ""),  # "": one call a line
    ),
    # <|tools_prefix|>[{"f": {...}}, {"g": {...}}]<|tools_suffix|>
    "apertus": JsonCallFormat(
        triggers=("<|tools_prefix|>",),
        wrapped=re.compile(r"<\|tools_prefix\|>\s*\[?\s*"),
        closers=("]", "<|tools_suffix|>"),
        separators=(",",),
        is_keyed=True,
    ),
    # <|tool_calls|><|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|>
    "solar_open": JsonCallFormat(
        triggers=("<|tool_call:begin|>",),
        bare=(
            re.compile(rf"<\|tool_call:begin\|>[^<>]*<\|tool_call:name\|>\s*{_NAME}\s*<\|tool_call:args\|>\s*(?=\{{)"),
        ),
        closers=("<|tool_call:end|>",),
        dropped=("<|tool_calls|>", "<|tool_call:name|>", "<|tool_call:args|>"),
    ),
    # <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>
    "minimax_m2": XmlCallFormat(
        call_start='<invoke name="',
        name_end='">',
        argument_start='<parameter name="',
        key_end='">',
        argument_end="</parameter>",
        call_end="</invoke>",
        dropped=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    # ]<]minimax[>[<invoke name="f">]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</invoke>
    "minimax_m3": MinimaxCallFormat(),
    # <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, or with <seed:tool_call>
    "qwen3_coder": XmlCallFormat(
        call_start="<function=",
        name_end=">",
        argument_start="<parameter=",
        key_end=">",
        argument_end="</parameter>",
        call_end="</function>",
        dropped=("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    # <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>; Hunyuan 3 writes <tool_sep> after f
    "glm45": XmlCallFormat(
        call_start="<tool_call>",
        name_end="",
        argument_start="<arg_key>",
        key_end="</arg_key>",
        value_start="<arg_value>",
        argument_end="</arg_value>",
        call_end="</tool_call>",
        separator="<tool_sep>",
        dropped=("<tool_calls>", "</tool_calls>"),
    ),
    # <|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|>
    "gemma4": GemmaCallFormat(),
    "openai": HarmonyCallFormat(),
}
# The grammar of tool_grammars/call_grammar.py: a list of wrapped calls is all of the text.
REQUIRED_CALLS: Final = JsonCallFormat(
    starts_text=True,
    wrapped=re.compile(r"\s*\[?\s*"),
    closers=("]",),
    separators=(",",),
    is_required=True,
)

# (text in a chat template, the format that it indicates). The first text that the template contains decides.
_SIGNS: Final[tuple[tuple[str, str], ...]] = (
    ("<|channel|>", "openai"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|tool_call>", "gemma4"),
    ("<|open|>", "kimi_k3"),
    (MINIMAX_MARK, "minimax_m3"),
    ("steptml:invoke", "step3"),
    ("<|tool_call:start|>", "solar_open2"),
    ("<|tool_call:begin|>", "solar_open"),
    ("<|tools_prefix|>", "apertus"),
    ("｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_calls>", "minimax"),
    ("<tool_call>", "hermes"),
    ("<TOOLCALL>", "hermes"),
    ("<longcat_tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|tool_list_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
)
_DEFAULT: Final = "llama3_json"
# (text in a chat template, the form of reasoning that it indicates). The first that the template contains decides.
_REASONING: Final[tuple[tuple[str, ReasoningFormat], ...]] = (
    ("</mm:think>", ReasoningFormat("<mm:think>", "</mm:think>")),
    ("<|inner_suffix|>", ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")),
    ("<|think:end|>", ReasoningFormat("<|think:start|>", "<|think:end|>")),
    ("[BEGIN FINAL RESPONSE]", ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    (  # Kimi K3: <|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...
        "<|open|>",
        ReasoningFormat(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            answer_start="<|open|>response<|sep|>",
            dropped=_K3_ANSWER,
        ),
    ),
    (  # Solar Open: <|think|>...<|end|><|begin|>assistant<|content|>...
        "<|begin|>assistant",
        ReasoningFormat(
            "<|think|>",
            "<|end|>",
            answer_header="<|begin|>assistant",
            answer_start="<|content|>",
            dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
        ),
    ),
    ("</think>", ReasoningFormat("<think>", "</think>")),
    ("[/THINK]", ReasoningFormat("[THINK]", "[/THINK]")),
    ("</seed:think>", ReasoningFormat("<seed:think>", "</seed:think>")),
    ("</longcat_think>", ReasoningFormat("<longcat_think>", "</longcat_think>")),
    ("<|END_THINKING|>", ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")),
    ("<channel|>", ReasoningFormat("<|channel>", "<channel|>", label="thought")),
)
_PROBE: Final = "a probe of the chat template"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`tool_format`: a key of TOOL_FORMATS. `reasoning`: None if the model does not mark its reasoning, or if its
    format is harmony, which has channels. `answer_tags`: the tags that may be around the answer after reasoning; see
    AnswerTags. `shows_special_tokens`: a marker is a special token, so the detokenizer must not skip special tokens."""

    tool_format: str = _DEFAULT
    reasoning: ReasoningFormat | None = None
    shows_special_tokens: bool = False
    answer_tags: tuple[str, str] | None = None

    @classmethod
    def detect(cls, template_source: str, special_tokens: Collection[str], tool_parser: str = "auto") -> "OutputFormat":
        """`tool_parser`: a key of TOOL_FORMATS, or "auto". Raises InvalidConfig for another."""
        if tool_parser not in ("auto", *TOOL_FORMATS):
            raise InvalidConfig(f"tool_parser is {tool_parser!r}; it must be auto or one of {', '.join(TOOL_FORMATS)}")
        found = next((name for sign, name in _SIGNS if sign in template_source), _DEFAULT)
        name = found if tool_parser == "auto" else tool_parser
        reasoning = next((form for sign, form in _REASONING if sign in template_source), None)
        if name == "openai":
            reasoning = None
        around = (reasoning.start, reasoning.end, *reasoning.dropped) if reasoning else ()
        shows_special = any(has_token(marker, special_tokens) for marker in (*TOOL_FORMATS[name].markers, *around))
        tags = next(((start, end) for start, end in TAGS if (start or end) in template_source), None)
        return cls(name, reasoning, shows_special, tags if reasoning else None)

    @property
    def calls(self) -> CallFormat:
        """The format of tool calls."""
        return TOOL_FORMATS[self.tool_format]

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks its reasoning."""
        return self.reasoning is not None or self.tool_format == "openai"


def find_reasoning_start(form: ReasoningFormat, render: Callable[[list[dict[str, Any]], bool], str]) -> ReasoningStart:
    """The ReasoningStart of prompts that end with the template's start of an assistant message. `render` takes messages
    and add_generation_prompt; the start is what the prompt has with it and lacks without it. A template that ignores
    add_generation_prompt has the start behind the user's text."""
    probe = [{"role": "user", "content": _PROBE}]
    whole, without = render(probe, True), render(probe, False)
    return reasoning_start_of(form, whole.removeprefix(without) or whole.rpartition(_PROBE)[2])


def reasoning_start_of(form: ReasoningFormat, text: str) -> ReasoningStart:
    """The ReasoningStart of a prompt that ends with `text`, by the last marker in it. In a format with channels a
    prompt that does not begin the answer leaves to the model whether it reasons once more."""
    start, end, answer = text.rfind(form.start), text.rfind(form.end), text.rfind(form.answer_start or form.end)
    if answer < end or start == answer:
        return ReasoningStart.UNDECIDED
    return ReasoningStart.OPEN if start > answer else ReasoningStart.CLOSED
