"""slow_removal: for tests of blocks that leave the index."""

import pytest

from coatcheck.router.routing import prefix_index


@pytest.fixture
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a group that has left are dropped one by one."""
    monkeypatch.setattr(prefix_index, "_REMOVALS_PER_MESSAGE", 1)
