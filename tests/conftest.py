"""What every test shares: hypothesis without deadlines, and each room's seconds at the end of a run."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# Two busy cores make single examples slow at random; the per-test timeout still bounds the whole.
settings.register_profile("coatcheck", deadline=None)
settings.load_profile("coatcheck")

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = Path(report.nodeid.split("::")[0]).parts
    room = parts[1] if len(parts) > 2 else "house"
    _seconds[room] += report.duration
    _tests[room] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds per room")
    for room, seconds in sorted(_seconds.items()):
        terminalreporter.write_line(f"{room:>10}  {seconds:7.1f} s  {_tests[room]:5d} tests")
