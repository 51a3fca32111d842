"""Progress: how many tests of each folder have ended in one pytest run, and how long they took.

A run writes its progress to a file, and `make test` shows the files of all its runs (tests/run.py).
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

_SAVE_SECONDS = 0.5


def folder_of(node_id: str) -> str:
    """The folder below tests/ that a test is in; `tests` for the files of tests/ itself."""
    parts = Path(node_id.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "tests"


@dataclass
class FolderProgress:
    """`seconds`: the sum over the tests that have ended, with their fixtures."""

    total: int = 0
    ended: int = 0
    seconds: float = 0.0


@dataclass
class Progress:
    """`failed`: the ids of the failed tests, in the order in which they failed."""

    folders: dict[str, FolderProgress] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def set_tests(self, node_ids: Iterable[str]) -> None:
        """Set the tests that will run."""
        self.folders = {}
        for node_id in node_ids:
            self.folders.setdefault(folder_of(node_id), FolderProgress()).total += 1

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of a test. A test has ended with its teardown."""
        folder = self.folders.setdefault(folder_of(report.nodeid), FolderProgress())
        folder.seconds += report.duration
        folder.ended += report.when == "teardown"
        if report.failed:
            self.failed.append(report.nodeid)

    def save(self, file: Path) -> None:
        """Replace the file, so that a reader never sees half of one."""
        temporary = file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(file)

    @classmethod
    def load(cls, file: Path) -> "Progress":
        """Read what `save` has written."""
        read = json.loads(file.read_text())
        return cls({name: FolderProgress(**folder) for name, folder in read["folders"].items()}, read["failed"])


class ProgressFile:
    """Saves the progress of this run to `file`, at most twice a second."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._progress = Progress()
        self._saved = 0.0

    def set_tests(self, node_ids: Iterable[str]) -> None:
        """Set the tests that will run, and save."""
        self._progress.set_tests(node_ids)
        self.save()

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        self._progress.add(report)
        if report.failed or time.monotonic() - self._saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Save now."""
        self._progress.save(self._file)
        self._saved = time.monotonic()
