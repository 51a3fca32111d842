"""A directory where `coatcheck serve` may be started."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shadowing_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose files have the names of modules. Each ends the process that imports it."""
    directory = tmp_path_factory.mktemp("shadowing")
    for name in ("code", "copy", "enum", "json", "numpy", "random", "torch", "types"):
        (directory / f"{name}.py").write_text("raise SystemExit(f'{__name__} of the current directory')\n")
    return directory
