"""Fixtures of the workers' tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny checkpoints lie, written on first use."""
    return tmp_path_factory.mktemp("checkpoints")
