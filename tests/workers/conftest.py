"""Fixtures of the workers' tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.served_group import Group, start_group


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of tiny checkpoints, which are written on first use."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from a second thread, and on busy cores lose much by waiting for it."""
    torch.set_num_threads(1)


@pytest.fixture
def group() -> Iterator[Group]:
    """A group that serves, for one test."""
    group = start_group()
    yield group
    group.loop.stop()
    group.service.stop()
    group.engine.check()
