"""ToolParser: calls and text do not depend on how the text was cut into pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.openai.tool_parser import ToolCallFormat, ToolParser, detect_format

CALL = '{"name": "f", "arguments": {"x": "</b>"}}'


def read(call_format: ToolCallFormat, pieces: list[str], **options: object) -> tuple[str, list[tuple[str, str]]]:
    """The whole text outside of calls, and all calls."""
    parser = ToolParser(call_format, **options)  # type: ignore[arg-type]  # by name
    text, calls = "", []
    for piece in pieces:
        shown, found = parser.feed(piece)
        text += shown
        calls += found
    rest, more = parser.finish()
    calls += more
    assert [call.index for call in calls] == list(range(len(calls))) and parser.has_complete_calls == bool(calls)
    return text + rest, [(call.name, call.arguments) for call in calls]


F = ("f", '{"x": "</b>"}')
CASES: list[tuple[ToolCallFormat, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"so <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> end", "so  end", [F, F]),
    ("hermes", f"<tool_call>{CALL}", "", [F]),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "<tool_call>not json</tool_call>!", "<tool_call>not json</tool_call>!", []),
    ("hermes", '<tool_call>{"arguments": 1}</tool_call>', '<tool_call>{"arguments": 1}</tool_call>', []),
    ("json", CALL, "", [F]),
    ("json", f"[{CALL}, {CALL}]", "", [F, F]),
    ("json", '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("json", '{"other": 1}', '{"other": 1}', []),
    ("json", f"see {CALL}", f"see {CALL}", []),
    ("json", " " + "[" * 3000, " " + "[" * 3000, []),
    ("named", '{"x": 1}', "", [("g", '{"x": 1}')]),
    ("json", "", "", []),
    ("required", f"[{CALL}, {CALL}]", "", [F, F]),
    ("required", "", "", []),
    ("required", "see", "see", []),
]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_cuts_do_not_matter(case: tuple[ToolCallFormat, str, str, list[tuple[str, str]]], cuts: list[int]) -> None:
    """Calls and the text around them are the same for any pieces."""
    call_format, text, wanted, calls = case
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    assert read(call_format, pieces, name="g") == (wanted, calls)


CUT: list[tuple[str, list[tuple[str, str]]]] = [
    ("[", []),
    ('[{"name": "f', []),
    ('[{"name": "f", "arguments": ', [("f", "")]),
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
    """If calls are required, nothing is text: the last call has the part of its arguments that was generated, and
    has_complete_calls is False."""
    text, calls = case
    parser = ToolParser("required")
    found: list[Any] = []
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        shown, more = parser.feed(text[start:end])
        assert not shown and not more
    shown, found = parser.finish()
    assert (shown, [(call.name, call.arguments) for call in found]) == ("", calls)
    assert [call.index for call in found] == list(range(len(calls))) and not parser.has_complete_calls


def test_at_most_so_many() -> None:
    """Without parallel calls only the first call is returned."""
    assert read("json", [f"[{CALL}, {CALL}]"], max_calls=1) == ("", [F])


@pytest.mark.parametrize(("source", "form"), [("... <tool_call> ...", "hermes"), ("{{ tools }}", "json")])
def test_the_template_says_how_calls_look(source: str, form: str) -> None:
    """A model writes calls in the format of its chat template."""
    assert detect_format(source) == form
    assert json.loads(CALL)["name"] == "f"
