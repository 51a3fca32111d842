"""Outcomes: how many tests passed, and which were skipped and why, over the several pytest runs of one `make test`."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Outcomes:
    """`skipped`: the ids of the skipped tests by the reason why."""

    passed: int = 0
    failed: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of a test. A test passes with its call, and fails with any phase."""
        if report.failed:
            self.failed += 1
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self.skipped.setdefault(reason, []).append(report.nodeid)
        elif report.when == "call":
            self.passed += 1

    def merge(self, other: "Outcomes") -> None:
        """Add what another run has counted."""
        self.passed += other.passed
        self.failed += other.failed
        for reason, names in other.skipped.items():
            self.skipped.setdefault(reason, []).extend(names)

    def save(self, file: Path) -> None:
        """Write a file that `load` reads."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(vars(self)))

    @classmethod
    def load(cls, file: Path) -> "Outcomes":
        """Read what `save` has written."""
        return cls(**json.loads(file.read_text()))

    def lines(self) -> list[str]:
        """For each reason the number of skipped tests and their files; then the counts."""
        lines = []
        for reason, names in sorted(self.skipped.items()):
            files = Counter(name.partition("::")[0] for name in names)
            lines.append(f"{len(names)} skipped: {reason}")
            lines += [f"    {count:4d} in {file}" for file, count in sorted(files.items())]
        skipped = sum(map(len, self.skipped.values()))
        return [*lines, f"{self.passed} passed, {self.failed} failed, {skipped} skipped"]
