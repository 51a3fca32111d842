"""Fixtures that make an index of few blocks do what an index of many does."""

import pytest

from coatcheck.router.routing import prefix_index, split_table


@pytest.fixture
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a group that has left are dropped one by one."""
    monkeypatch.setattr(prefix_index, "_REMOVALS_PER_MESSAGE", 1)


@pytest.fixture
def early_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are divided once they hold three blocks."""
    monkeypatch.setattr(split_table, "_SPLIT_BLOCKS", 2)
