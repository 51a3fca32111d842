"""Grammars meant to crash or block a process: the router refuses them in time, or a rank follows them in time."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatcheck.proto.grammar import Grammar, GrammarRefused
from coatcheck.router.event_loop.grammar_validator import GrammarValidator
from tests.hostile_grammars import GRAMMARS
from tests.system.grammar_rank import TOKENS

GOOD = Grammar("regex", "(yes|no)")
# What a thread gets by itself where the limit is low: half of what the router's check has.
_RANK_STACK_BYTES = 1 << 20
# Of the processor, for forty steps of the tiny model, a quarter of a second and one mask more, and slow machines.
_MAX_SECONDS = 20.0

# Each of these takes seconds until a limit ends it, which "a large divisor" shows too.
_SLOW = {"six divisors", "50 patterns at once", "one regex and not another", "8,000 items", "5,000 enum objects"}


class Rank:
    """The process of grammar_rank.py."""

    def __init__(self, directory: Path) -> None:
        def lower_the_stack() -> None:
            resource.setrlimit(resource.RLIMIT_STACK, (_RANK_STACK_BYTES, resource.RLIM_INFINITY))

        command = [sys.executable, "-m", "tests.system.grammar_rank", str(directory)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lower_the_stack
        )

    def follow(self, case: str) -> dict[str, Any]:
        """The result for one case. Fails if the process ends."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the rank has ended over it with {self.process.wait()}"
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rank]]:
    """The process that runs, if any."""
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.close()


@pytest.fixture
def rank(ranks: list[Rank], tmp_path: Path) -> Rank:
    """One process for all tests, until a grammar ends it."""
    if not ranks or ranks[-1].process.poll() is not None:
        ranks.append(Rank(tmp_path))
    return ranks[-1]


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarValidator]:
    """A router's grammar validator."""
    made = GrammarValidator()
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if case in _SLOW else []) for case in GRAMMARS]
)
async def test_no_grammar_ends_or_stops_a_process(check: GrammarValidator, rank: Rank, case: str) -> None:
    """The request gets an error that says what to change, or it works. Other requests are answered."""
    try:
        await check.validate(GRAMMARS[case]())
    except GrammarRefused as error:
        assert "cannot be compiled: " in str(error) and "; change the named part" in str(error)
    else:
        said = rank.follow(case)
        assert said["tokens"]["free"] == TOKENS and said["seconds"] < _MAX_SECONDS
        assert said["tokens"]["hostile"] > 0 or said["refused"]
        assert "free" not in said["refused"]
    await check.validate(GOOD)
