"""`make test` as a whole: an estimate, stages one after another with their progress, and last lines that sum up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_MAKEFILE = """
OUTCOMES = $(TEST_OUTCOMES)/outcomes-$(TEST_PART).json
PROGRESS = $(TEST_OUTCOMES)/progress-$(TEST_PART).json
one: ; @echo '{"passed": 3, "failed": 0, "skipped": {"no browser": ["a.py::x", "a.py::y"]}}' > $(OUTCOMES)
two: ; @echo '{"passed": 4, "failed": 0, "skipped": {"no browser": ["b.py::x"]}}' > $(OUTCOMES)
fails: ; @echo '{"passed": 0, "failed": 1, "skipped": {}}' > $(OUTCOMES); echo 'a traceback'; exit 1
never: ; touch never
said: ; @echo 'WORD is $(WORD)' > said
ENDED = "router": {"total": 2, "ended": 2, "seconds": 3.2}
OPEN = "proto": {"total": 9, "ended": 4, "seconds": 1.0}
folders: ; @echo '{"folders": {$(ENDED), $(OPEN)}, "failed": ["tests/proto/test_a.py::test_b"]}' > $(PROGRESS)
"""


def run(folder: Path, stages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests.run with these stages and the Makefile of this file."""
    (folder / "Makefile").write_text(_MAKEFILE)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.run import main; sys.exit(main({stages}, "
    command = [sys.executable, "-c", f"{program}{[*arguments]}))"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_last_lines_are_those_of_all_parts(tmp_path: Path) -> None:
    """Skipped tests of several runs are listed together by their reason, then the counts, then that all passed."""
    done = run(tmp_path, '(("one",), ("two", "said"))', "WORD=short")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()[-5:]
    assert lines == ["3 skipped: no browser", "       2 in a.py", "       1 in b.py", "7 passed, 0 failed, 3 skipped"]
    assert re.fullmatch(r"All passed in \d+ s: one, two, said", last)
    assert (tmp_path / "said").read_text() == "WORD is short\n"


def test_the_first_line_says_how_long_it_takes(tmp_path: Path) -> None:
    """Before the first run that is a range for 2 cores, afterwards what the last run that passed took here."""
    assert run(tmp_path, "()").stdout.startswith("This takes 12 to 33 minutes on 2 cores.\n")
    assert run(tmp_path, "()").stdout.startswith("This takes about 0 seconds, as the last time it passed here.\n")
    assert run(tmp_path, "()", "SAMPLE=").stdout.startswith("This takes more than an hour on 2 cores.\n")


def test_progress_is_shown_by_folder(tmp_path: Path) -> None:
    """There is a line for each folder whose tests have ended, for each test that failed, and for each part."""
    lines = [line.partition(" s  ")[2] for line in run(tmp_path, '(("folders",),)').stdout.splitlines()]
    assert [line for line in lines if line] == [
        "FAILED tests/proto/test_a.py::test_b",
        "folders: router 2 of 2 tests, 3 s",
        "folders passed",
    ]


def test_the_last_line_names_the_part_that_failed(tmp_path: Path) -> None:
    """A part that fails ends the run when the parts beside it have ended; its output is shown, and it is named."""
    done = run(tmp_path, '(("one",), ("fails", "two"), ("never",))')
    assert done.returncode == 1 and not (tmp_path / "never").exists()
    assert "a traceback" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["7 passed, 1 failed, 3 skipped", "FAILED in: fails"]


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_the_parts_are_in_the_makefile(target: str) -> None:
    """Both targets run the module, and each part that it names is a target."""
    from tests.run import STAGES

    text = (ROOT / "Makefile").read_text()
    assert f"\n{target}: programs\n\t@$(BIN)/python -m tests.run" in text
    assert all(f"\n{part}: " in text for stage in STAGES for part in stage)
