"""RankProcesses: what happens when a group cannot start its processes now, and when ranks end together."""

import asyncio
import gc
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coatcheck.cluster.local.child_rank import ChildRank
from coatcheck.cluster.local.rank_processes import RankProcesses
from coatcheck.cluster.supervision.rank_end import RankEnded
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import RankProgress


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


async def test_a_rank_that_ends_last_leaves_no_unread_error(tmp_path: Path) -> None:
    """RankEnded is raised once a rank has ended. The answer of the other rank fails later, when that rank is killed:
    this is no error for asyncio to log."""
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    answers: list[asyncio.Future[RankProgress]] = [loop.create_future() for _ in range(2)]
    answers[0].set_exception(EOFError())
    ended: asyncio.Future[None] = loop.create_future()
    ended.set_result(None)
    config = GroupConfig("g", str(tmp_path), "m", device="cpu", tp=2)
    ranks = RankProcesses(config, tmp_path, ranks_before=0, ranks_on_host=2)
    for answer in answers:
        ask = partial(lambda it: it, answer)
        rank = SimpleNamespace(ask_progress=ask, exit=ended, error=None, log=tmp_path / "log")
        ranks._ranks.append(cast(ChildRank, rank))
    with pytest.raises(RankEnded, match="rank 0 has ended: its process died"):
        await ranks.read_progress()
    answers.pop().set_exception(EOFError())
    del answer, ask, rank
    ranks._ranks.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert not reports
