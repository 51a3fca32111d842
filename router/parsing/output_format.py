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
from coatcheck.router.parsing.pythonic_tool_parser import MARKERS as PYTHONIC_MARKERS
from coatcheck.router.parsing.reasoning_parser import ReasoningFormat, ReasoningStart
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
class HarmonyCallFormat:
    """See HarmonyParser."""

    markers: tuple[str, ...] = HARMONY_MARKERS
    openings: tuple[str, ...] = ()  # a call is a message of its own


CallFormat = JsonCallFormat | XmlCallFormat | PythonicCallFormat | GemmaCallFormat | HarmonyCallFormat

JSON_MARKERS: Final = ("<|python_tag|>", "<|tool_call|>", "<|plugin|>", "<|START_ACTION|>", "functools[")
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
        marks_strings=True,
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
        closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
    ),
    # <tool_calls>\n{"name": ..., "arguments": {...}}\n</tool_calls>, or with a list: Hunyuan's, Jamba's and Apriel's
    "minimax": JsonCallFormat(
        triggers=("<tool_calls>",),
        wrapped=re.compile(r"<tool_calls>\s*\[?\s*"),
        closers=("]", "</tool_calls>"),
        separators=(",", ""),  # "": one call a line
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
    # <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>; Hunyuan 3's has <tool_sep> behind f
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

# What a template contains if its model has the format; the first that is found counts.
_SIGNS: Final[tuple[tuple[str, str], ...]] = (
    ("<|channel|>", "openai"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|tool_call>", "gemma4"),
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
_REASONING: Final = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<longcat_think>", "</longcat_think>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningFormat("<|channel>", "<channel|>", label="thought"),
)
_PROBE: Final = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """`tool_format`: a key of TOOL_FORMATS. `reasoning`: None if the model does not mark its reasoning, or if its
    format is harmony, which has channels. `answer_tags`: what may stand around the answer behind reasoning; see
    AnswerTags. `shows_special_tokens`: a marker is a special token, so texts must keep them."""

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
        reasoning = next((form for form in _REASONING if form.end in template_source), None)
        if name == "openai":
            reasoning = None
        markers = (*TOOL_FORMATS[name].markers, *((reasoning.start, reasoning.end) if reasoning else ()))
        tags = next((pair for pair in TAGS if pair[0] in template_source), None) if reasoning else None
        return cls(name, reasoning, any(marker in special_tokens for marker in markers), tags)

    @property
    def calls(self) -> CallFormat:
        """The format of tool calls."""
        return TOOL_FORMATS[self.tool_format]

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks its reasoning."""
        return self.reasoning is not None or self.tool_format == "openai"


def find_reasoning_start(form: ReasoningFormat, render: Callable[[list[dict[str, Any]], bool], str]) -> ReasoningStart:
    """What the beginning of an assistant's message says about reasoning. `render` takes messages and
    add_generation_prompt; what the second rendering adds to the first is that beginning."""
    whole, without = render(_PROBE, True), render(_PROBE, False)
    return reasoning_start_of(form, whole.removeprefix(without))


def reasoning_start_of(form: ReasoningFormat, text: str) -> ReasoningStart:
    """What the end of a prompt, or of what a template adds to it, says about reasoning: its last marker."""
    start, end = text.rfind(form.start), text.rfind(form.end)
    if start == end:
        return ReasoningStart.UNDECIDED
    return ReasoningStart.OPEN if start > end else ReasoningStart.CLOSED
