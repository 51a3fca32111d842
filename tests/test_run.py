"""`make test` as a whole: stages one after another, and last lines that sum them up."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_MAKEFILE = """
one: ; @echo '{"passed": 3, "failed": 0, "skipped": {"no browser": ["a.py::x", "a.py::y"]}}' > $(TEST_OUTCOMES)/1.json
two: ; @echo '{"passed": 4, "failed": 0, "skipped": {"no browser": ["b.py::x"]}}' > $(TEST_OUTCOMES)/2.json
fails: ; @echo '{"passed": 0, "failed": 1, "skipped": {}}' > $(TEST_OUTCOMES)/3.json; exit 1
never: ; touch never
said: ; @echo 'WORD is $(WORD)'
"""


def run(folder: Path, stages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """tests.run with these stages, on a Makefile of this test's own."""
    (folder / "Makefile").write_text(_MAKEFILE)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.run import main; sys.exit(main({stages}, "
    command = [sys.executable, "-c", f"{program}{[*arguments]}))"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_last_lines_are_those_of_all_parts(tmp_path: Path) -> None:
    """Skipped tests of several runs are listed together by their reason, then the counts, then that all passed."""
    done = run(tmp_path, '(("one",), ("two", "said"))', "WORD=short")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-5:] == [
        "3 skipped: no browser",
        "       2 in a.py",
        "       1 in b.py",
        "7 passed, 0 failed, 3 skipped",
        "All passed: one, two, said",
    ]
    assert "WORD is short" in done.stdout


def test_the_last_line_names_the_part_that_failed(tmp_path: Path) -> None:
    """A part that fails ends the run when the parts beside it have ended, and is named."""
    done = run(tmp_path, '(("one",), ("fails", "two"), ("never",))')
    assert done.returncode == 1 and not (tmp_path / "never").exists()
    assert done.stdout.splitlines()[-2:] == ["7 passed, 1 failed, 3 skipped", "FAILED in: fails"]


@pytest.mark.parametrize("target", ["test", "test-all"])
def test_the_parts_are_in_the_makefile(target: str) -> None:
    """Both targets run the module, and each part that it names is a target."""
    from tests.run import STAGES

    text = (ROOT / "Makefile").read_text()
    assert f"\n{target}: programs\n\t@$(BIN)/python -m tests.run" in text
    assert all(f"\n{part}: " in text for stage in STAGES for part in stage)
