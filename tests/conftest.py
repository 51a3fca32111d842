"""What every test shares: hypothesis without deadlines, limits for hangs, and a run's last lines."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.unraisableexception import collect_unraisable  # public nowhere
from hypothesis import settings

from tests.outcomes import Outcomes

# Tests start each Ray with settings of their own: a token or an address from the environment would reach it.
for name in list(os.environ):
    if name.startswith("RAY_") and name != "RAY_TMPDIR":
        del os.environ[name]

# gRPC's core reads this as it is imported. By itself it reports each server that ends with a call open, and many do
# here. Processes that tests start do not inherit it: what they say is part of what is tested.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GRPC_VERBOSITY", os.environ.get("GRPC_VERBOSITY", "ERROR"))
    import grpc  # noqa: F401

# Two busy cores make single examples slow at random; the per-test timeout still bounds the whole.
settings.register_profile("coatcheck", deadline=None)
settings.load_profile("coatcheck")

# What starts Ray waits for several events, each for PATIENCE_SECONDS at most. pyproject.toml has the others' limit.
RAY_TEST_SECONDS = 1800

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_outcomes = Outcomes()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(RAY_TEST_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collect the test's garbage while the test can still be blamed for it: pytest reports a warning from a finalizer
    (an unclosed socket, a coroutine that nobody awaited) with the test that runs when the finalizer does."""
    try:
        yield
    finally:
        # The traceback of a test that failed keeps its local variables.
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        if nextitem is None or nextitem.path != item.path:
            gc.unfreeze()
        gc.collect()
        # What is alive now is left out of the next collections, until the last one of the file. That takes the cost of
        # a collection from 80 ms to 28 ms.
        gc.freeze()
        collect_unraisable(item.config)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = Path(report.nodeid.split("::")[0]).parts
    room = parts[1] if len(parts) > 2 else "house"
    _seconds[room] += report.duration
    _tests[room] += report.when == "call"
    _outcomes.add(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds per room")
    for room, seconds in sorted(_seconds.items()):
        terminalreporter.write_line(f"{room:>10}  {seconds:7.1f} s  {_tests[room]:5d} tests")
    # The workers of pytest-xdist have a summary too, of tests that their controller counts as well.
    if (folder := os.environ.get("TEST_OUTCOMES")) and "PYTEST_XDIST_WORKER" not in os.environ:
        _outcomes.save(Path(folder, f"{os.getpid()}.json"))
    terminalreporter.section("outcomes")
    for line in _outcomes.lines():
        terminalreporter.write_line(line)
