"""Fixtures of the workers' tests."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny checkpoints lie, written on first use."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and on busy cores lose much by waiting for it."""
    torch.set_num_threads(1)
