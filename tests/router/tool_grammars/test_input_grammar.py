"""The grammar of a custom tool's input holds in every format of calls, as text and inside of JSON."""

import contextlib
import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.openai.chat_response import join_calls
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import OutputParser, ParsingPlan
from coatcheck.router.tool_grammars.call_grammar import named_call_grammar, required_calls_grammar
from coatcheck.router.tool_grammars.input_grammar import CustomFunction, InputGrammar, check_definitions
from coatcheck.router.tool_grammars.json_quoted import quote_pattern
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar
from tests.router.tiny_tokenizer import byte_level_tokenizer
from tests.router.tool_grammars.allowed_text import allows

BYTES = LLTokenizer("byte")
# Lines with any text between two markers, as in the grammars of agents for patches.
LINES = r"""
start: begin line+ end  // the lines
begin: "*** Begin" LF
?line: "+" /(.*)/ LF -> added
    | "?" LETTER ~ 2 LF
end: "*** End" LF?
%import common (LF, LETTER)
"""
GOOD, BAD = '*** Begin\n+say "hi"\t\\n\n?ab\n+\n*** End', "*** Begin\n*** End"
# Recursive, so it cannot be one terminal.
SUM = 'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: "0".."9"+\n'
VERBOSE = r"""(?x)
    (?P<verb> read | write )  # what to do (
    \ [a-z \# ]+               # and with which file
"""
STRICT: Any = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(definition: str, syntax: Any = "lark") -> CustomFunction:
    return CustomFunction("patch", "Patches.", InputGrammar(syntax, definition))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole answer that the grammar allows."""
    grammar.check_compiles()
    matcher = LLMatcher(BYTES, grammar.to_llguidance(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def json_call(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (tool(LINES), (GOOD, GOOD + "\n"), (BAD, GOOD + "x", "", "so")),
        (tool(SUM), ("(1+(22+3))",), ("(1+", "a")),
        (tool(r'^(?P<m>Jan|Feb)\s+\d{1,2}/"x"$', "regex"), ('Jan \n12/"x"',), ("Jan 123", "Mar 1")),
        (tool('start: "a"\nstart_of: "b"'), ("a",), ("b",)),
        (tool(VERBOSE, "regex"), ("read x", "write a#b"), ("readx", "read x ", "read\nx", VERBOSE)),
    ],
)
def test_an_input_in_json_fits_its_grammar(
    function: CustomFunction, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    """Named, required, and alone."""
    assert function.input_grammar is not None
    for text in (*good, *bad):
        assert accepts(function.input_grammar.alone(), text) == (text in good), text
        assert accepts(named_call_grammar(function), json_call(text)) == (text in good), text
        call = f'{{"name": "patch", "arguments": {json_call(text)}}}'
        other = '{"name": "f", "arguments": {"n": 1}}'
        required = required_calls_grammar([function, Function(name="f", parameters=STRICT)], parallel=True)
        assert accepts(required, f"[{other}, {call}]") == (text in good), text


# name -> (tool format, special tokens, a call with the input TEXT, or JSON for all of its arguments)
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "hermes": ("hermes", (), '<tool_call>\n{"name": "patch", "arguments": JSON}\n</tool_call>'),
    "llama": ("llama3_json", (), '{"name": "patch", "parameters": JSON}'),
    "pythonic": ("pythonic", (), "[patch(input=STRING)]"),
    "mistral": ("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]patch[ARGS]JSON"),
    "qwen3 coder": ("qwen3_coder", (), "<function=patch>\n<parameter=input>\nTEXT\n</parameter>\n</function>"),
    "glm": ("glm45", (), "<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>TEXT</arg_value>\n</tool_call>"),
    "deepseek v3.2": (
        "deepseek_v32", (),
        '<｜DSML｜invoke name="patch">\n<｜DSML｜parameter name="input" string="true">TEXT</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>"),
    "kimi k3": (
        "kimi_k3", ("<|open|>", "<|close|>", "<|sep|>"),
        '<|open|>call tool="patch" index="1"<|sep|><|open|>argument key="input" type="string"<|sep|>TEXT<|close|>'
        "argument<|sep|><|close|>call<|sep|>"),
    "gpt-oss": (
        "openai", ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"),
        "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>JSON<|call|>"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (tool(LINES), GOOD, BAD),
        (tool(SUM), "(1+2)", "(1-"),
        (tool(r"say .+[!?\n]", "regex"), 'say "</y>"!', "hi!"),
        (tool(VERBOSE, "regex"), "write a#b", "write a b"),
    ],
)
def test_an_input_in_a_call_fits_its_grammar(case: str, function: CustomFunction, good: str, bad: str) -> None:
    """Where the model may answer with text. The format's parser reads the input that was written."""
    tool_format, special, form = FORMATS[case]
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(list(special))
    ids = {marker: tokenizer.token_to_id(marker) or 0 for marker in special}
    grammar = strict_calls_grammar([function, Function(name="f", parameters=STRICT)], tool_format, ids)

    def called(text: str) -> str:
        arguments = form.replace("JSON", json_call(text)).replace("STRING", json.dumps(text, ensure_ascii=False))
        return arguments.replace("TEXT", text)

    assert allows(grammar, special, called(good))
    assert not allows(grammar, special, called(bad))
    schemas = {"patch": function.parameters}
    plan = ParsingPlan(OutputFormat(tool_format), tool_mode="auto", schemas=schemas, custom_tools=frozenset(["patch"]))
    (call,) = join_calls(OutputParser(plan).feed_delta(called(good), is_last=True))
    assert (call.name, call.arguments, call.is_custom) == ("patch", good, True)


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^"]', r'[\n"]+', r"[\w\s]+", r".", r"(?s).", r"[^\\\n]*", r"\x22\x5c", r"[ -~]", r"[\x00-\x1f]", r'a"?b\\',
        r"\S", r"(?s:.)a|.", r"[]a]", r"[a\]]", r"[\--a]", r"\W", r"[^\s]", r"[\t-\r]", "(\n|a){1,2}", r"(?i)[a-z\n]",
        r"\x{22}|\u0061|[\x{5c}]", r"[a-]", r"(?P<x>\t)+", r"[\x41-\x5d]",
    ],
)  # fmt: skip
def test_a_pattern_in_json_matches_the_same_texts(pattern: str) -> None:
    """Each character alone and beside others."""
    plain, quoted = (
        LLMatcher(BYTES, Grammar("regex", one).to_llguidance()) for one in (pattern, quote_pattern(pattern))
    )
    assert not plain.is_error() and not quoted.is_error(), quoted.get_error()
    for character in [*map(chr, range(128)), "é"]:
        for text in (character, f'{character}"', f"a{character}"):
            inside = json.dumps(text, ensure_ascii=False)[1:-1]
            assert _matches(plain, text) == _matches(quoted, inside), (text, quote_pattern(pattern))


def _matches(matcher: LLMatcher, text: str) -> bool:
    tokens, copy = BYTES.tokenize_str(text), matcher.deep_copy()
    return copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens) and copy.is_accepting()


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ('start: %json {"type": "object"}', "%json"),
        ("start: <|end|>", "end"),
        ("start: @other", "@other"),
        ("start: A\nA: ~/a/", "'~'"),
        (r"start: /\p{L}/", r"\\\\p"),
        ("start: /(?=a)b/", r"\(\?=a"),
        ("start: /[a&&b]/", "in a class"),
        ("start: /a b/x", "the flag x"),
        ("start: /(?x) a b/", r"the flags '\(\?x\)', of which only i, m, s and U are possible"),
        (r"start: /[a-\s]/", "a-"),
        ("start: /" + "." * 3000 + "/", "has over 262144 characters"),
        ('start: "a\\n"i', "a"),
        ("start: A\n%import other.A", "%import other.A"),
        (r"start: a" "\n" r'a: "\n" a /".*/ | "b"', "recursion"),
        ("start: A\nA: /.+/\n%ignore /\\s/", "ignored text"),
    ],
)
def test_what_has_no_counterpart_in_json_is_refused(definition: str, words: str) -> None:
    """The error names the part and says what to send instead."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        named_call_grammar(tool(definition))
    assert "set the tool's format to text" in str(refused.value)


@pytest.mark.parametrize(
    ("case", "end"),
    [("qwen3 coder", "</parameter>"), ("glm", "</arg_value>"), ("deepseek v3.2", "</｜DSML｜parameter>")],
)
@pytest.mark.parametrize(
    ("definition", "syntax"),
    [('start: s\ns: "a" | "END" s', "lark"), ("start: /[ab]END/", "lark"), ('start: "END"', "lark"), ("aEND", "regex")],
    ids=["recursive", "pattern", "string", "regex"],
)
def test_the_end_tag_of_the_format_is_refused_in_a_grammar(case: str, end: str, definition: str, syntax: str) -> None:
    """The parser ends the input at the first end tag: what it reads would not fit the grammar. In a format that writes
    inputs as JSON strings the tag is text like any other."""
    escaped = end.replace("/", r"\/") if "/[" in definition else end
    function = tool(definition.replace("END", escaped), syntax)
    with pytest.raises(InvalidRequest, match="has .*, which ends the input.*set the tool's format to text") as refused:
        strict_calls_grammar([function], FORMATS[case][0], {})
    assert repr(end) in str(refused.value)
    strict_calls_grammar([function], "hermes", {}).check_compiles()


def test_a_question_mark_before_a_name_makes_the_part_before_it_optional() -> None:
    """It is a part of the name only at the beginning of a line."""
    grammar = named_call_grammar(tool('?start: "a"?b\nb: "c"'))
    assert [text for text in ("c", "ac", "a") if accepts(grammar, json_call(text))] == ["c", "ac"]


def test_a_wrong_import_gets_the_error_of_llguidance() -> None:
    """In a format that writes inputs as they are."""
    grammar = strict_calls_grammar([tool("start: A\n%import other.A")], "qwen3_coder", {})
    with pytest.raises(InvalidRequest, match="Unknown common regex: other.A"):
        grammar.check_compiles()


def test_a_format_without_strict_calls_refuses_grammars() -> None:
    """The error says that the call must be required."""
    with pytest.raises(InvalidRequest, match="custom tools with a grammar need tool_choice"):
        strict_calls_grammar([tool(SUM)], "mistral", {})
    assert not CustomFunction("free").strict


@pytest.mark.parametrize(
    "definition",
    [
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n',
        "start: A\nA: /" + r"[\n-a]" * 9000 + "/",
        'start: "' * 8000,
        "start: /" * 8000,
        'start: "' + r"\"" * 32000,
        "start: /" + r"\/" * 32000,
        "start: /" + "." * 65000 + "/",
        "start: WS\n%import common (" + "WS," * 21000 + "WS)\n",
    ],
    ids=[
        "a chain of rules",
        "many classes",
        "strings that do not end",
        "patterns that do not end",
        "a string of escapes",
        "a pattern of escapes",
        "a pattern of dots",
        "many imports",
    ],
)
def test_a_long_definition_takes_little_time(definition: str) -> None:
    """Less than a second of CPU for the longest one, also if it is wrong."""
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        named_call_grammar(tool(definition))
    assert time.process_time() - began < 1.0


def test_definitions_are_limited_together() -> None:
    """Each may have 65,536 characters, and all of a request four times as many."""
    long = tool("a" * 65536, "regex")
    check_definitions([long] * 4)
    with pytest.raises(InvalidRequest, match="327680 characters together; the maximum is 262144"):
        check_definitions([long] * 5)
