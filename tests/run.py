"""Runs the parts of `make test` and shows their progress: `python -m tests.run`.

The first line says how long it will take. Then there is a line when the tests of a folder have ended, when a part has
ended, and when a test fails. A line of totals is renewed in place, or printed every 30 s if there is no terminal. The
output of a part is printed when the part fails. The last lines say what was skipped and whether all passed.

Arguments go to make, such as SAMPLE= for the full matrices. After a stage in which a part fails, no further stage runs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.outcomes import Outcomes
from tests.progress import Progress

# Targets of the Makefile. Those of one stage run side by side.
STAGES = (("lint",), ("types", "tests-together", "tests-ray"))
# Duration by make's arguments: of `make test` the shortest and longest that bench/LOG.md has since 2026-11-23.
STATED = {"": "12 to 33 minutes on 2 cores", "SAMPLE=": "more than an hour on 2 cores"}
# Holds the duration of the last run that passed, by make's arguments.
RECORD = Path(".pytest_cache", "make_test_seconds.json")
_POLL_SECONDS = 0.2
_TOTALS_SECONDS = 30.0  # between two lines of totals where there is no terminal


def main(stages: tuple[tuple[str, ...], ...], arguments: list[str]) -> int:
    """Return the exit code: 0 when every part passed."""
    print(estimate(arguments), flush=True)
    # These variables are for the children of the outer make; a make that is started here must not read them.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        display = Display(folder)
        for stage in stages:
            failed = run_stage(stage, arguments, environment, folder, display)
            if failed:
                break
        outcomes = Outcomes()
        for file in sorted(folder.glob("outcomes-*.json")):
            outcomes.merge(Outcomes.load(file))
    print("\n".join(["", *outcomes.lines()]))
    parts = ", ".join(part for stage in stages for part in stage)
    took = f" in {display.elapsed():.0f} s"
    print(f"FAILED in: {', '.join(failed)}" if failed else f"All passed{took}: {parts}", flush=True)
    if not failed:
        record(arguments, display.elapsed())
    return 1 if failed else 0


def estimate(arguments: list[str]) -> str:
    """How long a run will take: as long as the last one here that passed, or else the stated duration."""
    key = " ".join(arguments)
    if last := recorded().get(key):
        return f"This takes about {_duration(last)}, as the last time it passed here."
    if key in STATED:
        return f"This takes {STATED[key]}."
    return "How long this takes is not known yet."


def recorded() -> dict[str, float]:
    """The seconds of former runs by make's arguments."""
    try:
        seconds: dict[str, float] = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return seconds


def record(arguments: list[str], seconds: float) -> None:
    """Write down for the next run how long this one took."""
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps({**recorded(), " ".join(arguments): seconds}))


def run_stage(
    stage: tuple[str, ...], arguments: list[str], environment: dict[str, str], folder: Path, display: "Display"
) -> list[str]:
    """Run the parts of a stage side by side to their ends; return those that failed."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed = []
    for part in stage:
        variables = environment | {"TEST_OUTCOMES": str(folder), "TEST_PART": part}
        command = ["make", "--no-print-directory", *arguments, part]
        with (folder / f"{part}.log").open("wb") as log:
            running[part] = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    while running:
        time.sleep(_POLL_SECONDS)
        display.show_progress()
        for part in [part for part, process in running.items() if process.poll() is not None]:
            has_failed = running.pop(part).returncode != 0
            if has_failed:
                failed.append(part)
                display.print_line((folder / f"{part}.log").read_text(errors="replace"))
            display.show_progress()
            display.print_line(f"{part} {'FAILED' if has_failed else 'passed'}")
    return failed


class Display:
    """Prints the news of the progress files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun = time.monotonic()
        self._printed: set[str] = set()
        self._totals_at = self._begun
        self._is_terminal = sys.stdout.isatty()

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun

    def show_progress(self) -> None:
        """Print the folders whose tests have ended and the tests that have failed, then the totals if they are due."""
        parts = {file.stem.removeprefix("progress-"): Progress.load(file) for file in self._progress_files()}
        for part, progress in parts.items():
            for test in progress.failed:
                self._print_once(test, f"FAILED {test}")
            for name, tests in progress.folders.items():
                if tests.ended == tests.total:
                    line = f"{part}: {name} {tests.ended} of {tests.total} tests, {tests.seconds:.0f} s"
                    self._print_once(f"{part} {name}", line)
        folders = [item for progress in parts.values() for item in progress.folders.items()]
        now = time.monotonic()
        if folders and now - self._totals_at > (1.0 if self._is_terminal else _TOTALS_SECONDS):
            self._totals_at = now
            ended, total = (sum(getattr(tests, count) for _, tests in folders) for count in ("ended", "total"))
            unfinished = [f"{name} {tests.ended}/{tests.total}" for name, tests in folders if tests.ended < tests.total]
            self._show_totals(f"{ended} of {total} tests; {', '.join(unfinished)}")

    def print_line(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(f"{clear}{self.elapsed():5.0f} s  {text}", flush=True)

    def _progress_files(self) -> list[Path]:
        return sorted(self._folder.glob("progress-*.json"))

    def _print_once(self, key: str, line: str) -> None:
        if key not in self._printed:
            self._printed.add(key)
            self.print_line(line)

    def _show_totals(self, text: str) -> None:
        if not self._is_terminal:
            self.print_line(text)
            return
        width = os.get_terminal_size(sys.stdout.fileno()).columns
        print(f"\r\x1b[K{f'{self.elapsed():5.0f} s  {text}'[: width - 1]}", end="", flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


if __name__ == "__main__":
    try:
        sys.exit(main(STAGES, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
