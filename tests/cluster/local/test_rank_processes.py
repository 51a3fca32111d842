"""RankProcesses: a group that cannot start its processes now is started again later."""

import socket
from pathlib import Path

import pytest

from coatcheck.cluster.local.rank_processes import RankProcesses
from coatcheck.cluster.supervision.rank_end import RankEnded
from coatcheck.workers.core.group_config import GroupConfig


async def test_a_start_without_a_free_descriptor_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this process has too many open files no listener can be made. The start fails as that of a rank does, so
    that the group's supervisor tries again. Any other error would end `coatcheck serve` and the groups that run."""

    def fail(address: tuple[str, int]) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", fail)
    config = GroupConfig("g", str(tmp_path), "m", device="cpu", threads=1)
    ranks = RankProcesses(config, tmp_path, ranks_before=0, ranks_on_host=1)
    with pytest.raises(RankEnded, match="rank 0 could not start: .* Too many open files"):
        await ranks.start_ranks(0, 0)
    assert not ranks.is_running
