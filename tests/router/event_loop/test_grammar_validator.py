"""Grammars that would stop a router or a group are refused in time, and valid ones are accepted."""

import json
import time
from collections.abc import Iterator

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.event_loop.grammar_validator import GrammarValidator, compile_grammar
from coatcheck.router.event_loop.side_process import SideProcesses

# Each compiles for minutes, or takes a process with it.
HOSTILE = {
    "a large divisor": Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'),
    "rules nested deep": Grammar("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(4000))
                                 + 'r4000: "a"\n'),
}  # fmt: skip


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarValidator]:
    """One for all of these tests. Each test has its own grammars, because the validator keeps results."""
    made = GrammarValidator()
    yield made
    made.close()


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_takes_too_long_is_refused(check: GrammarValidator, case: str) -> None:
    """The error says what to change. The next grammar compiles as usual, and asking again takes no time."""
    with pytest.raises(InvalidRequest, match=r"cannot be compiled: it takes .*change the named part") as first:
        await check.validate(HOSTILE[case])
    await check.validate(Grammar("json_schema", json.dumps({"type": "object", "properties": {case: {}}})))
    with pytest.raises(InvalidRequest) as second:
        await check.validate(HOSTILE[case])
    assert str(first.value) == str(second.value)


async def test_what_would_end_an_answer_that_has_begun_is_refused(check: GrammarValidator) -> None:
    """The parser's limits are reached only while a text is matched. A schema that is too wide, one that nothing fits,
    and one that only an endless text fits are refused before an answer begins."""
    wide = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(500)}}
    for grammar, words in (
        (Grammar("json_schema", json.dumps(wide)), "2007 alternatives .*; an optional property counts as four"),
        (Grammar("regex", r"[^\s\S]"), "no further text"),
        (Grammar("grammar", 'start: "a" start\n'), "Too many items"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await check.validate(grammar)
    await check.validate(Grammar("json_schema", json.dumps({**wide, "required": list(wide["properties"])})))


def compile_and_count_pauses(grammar: Grammar) -> tuple[float, list[float]]:
    """Runs in a side process: (seconds of compile_grammar, its pauses)."""
    pauses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", pauses.append)
        _, seconds = compile_grammar(grammar)
    return seconds, pauses


@pytest.mark.usefixtures("tests_are_importable")
async def test_the_process_that_compiles_pauses_after_each_grammar() -> None:
    """The pause is three times as long as compiling, and a client that disconnects does not shorten it."""
    side = SideProcesses(processes=1)
    try:
        seconds, pauses = await side.run(compile_and_count_pauses, Grammar("regex", "a+"))
        assert pauses == [3 * min(seconds, 0.25)]
    finally:
        side.close()


@pytest.mark.parametrize(("schema", "place"), [
    ({"properties": {"x": {"items": {"minimum": "a", "type": "integer"}}}}, "#/properties/x/items"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [
        {"properties": {"a/b": {"type": "string", "pattern": "(?=a)"}}}]}}}, "#/$defs/A/anyOf/0/properties/a~1b"),
    ({"type": "nothing"}, ""),
])  # fmt: skip
async def test_the_part_that_is_wrong_is_named(check: GrammarValidator, schema: dict[str, object], place: str) -> None:
    """The error has a JSON pointer to the innermost schema that is refused for the same reason."""
    with pytest.raises(InvalidRequest) as refused:
        await check.validate(Grammar("json_schema", json.dumps(schema)))
    assert (f", at {place};" in str(refused.value)) if place else (", at #" not in str(refused.value))


async def test_what_is_wrong_is_said(check: GrammarValidator) -> None:
    """The error has llguidance's reason."""
    with pytest.raises(InvalidRequest, match="regex cannot be compiled: .*invalid regex"):
        await check.validate(Grammar("regex", "("))
    await check.validate(Grammar.of_choices(["yes", "no"]))
