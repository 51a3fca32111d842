"""Grammars that would stop a router or a group: each is refused in its time, and what is good goes through."""

from collections.abc import AsyncIterator

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.router.grammar_check import GrammarCheck

GOOD = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
# Each compiles for minutes, or takes a process with it.
HOSTILE = {
    "a large divisor": Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'),
    "rules nested deep": Grammar("grammar", "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(4000))
                                 + 'r4000: "a"\n'),
}  # fmt: skip


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    """Ends with the test."""
    made = GrammarCheck()
    yield made
    made.close()


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_takes_too_long_is_refused(check: GrammarCheck, case: str) -> None:
    """With what to change; the next grammar compiles as if nothing had been, and asking again takes no time."""
    with pytest.raises(InvalidRequest, match=r"cannot be compiled: it takes .*change what it names") as first:
        await check.require(HOSTILE[case])
    await check.require(GOOD)
    with pytest.raises(InvalidRequest) as second:
        await check.require(HOSTILE[case])
    assert str(first.value) == str(second.value)


async def test_what_is_wrong_is_said(check: GrammarCheck) -> None:
    """By whoever reads the grammar."""
    with pytest.raises(InvalidRequest, match="regex cannot be compiled: .*invalid regex"):
        await check.require(Grammar("regex", "("))
    await check.require(Grammar.of_choices(["yes", "no"]))
