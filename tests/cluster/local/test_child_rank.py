"""ChildRank: a rank as a child process, and the errors that it sends."""

import asyncio
import os
from pathlib import Path

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.local.child_rank import ChildRank
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.rank_process import RankStart


async def test_any_error_of_a_start_reaches_the_parent(tmp_path: Path) -> None:
    """An error that is no CoatcheckError, here of a listener that is no socket, comes with its type and its reason."""
    listener = os.open(os.devnull, os.O_RDONLY)
    start = RankStart(
        GroupConfig("g", str(tmp_path), "m", device="cpu", threads=1),
        rank=0,
        rendezvous="127.0.0.1:1",
        listener=listener,
        rank_on_host=0,
        ranks_on_host=1,
        record_base=str(tmp_path / "record"),
        parent=os.getpid(),
    )
    rank = ChildRank.start(start, tmp_path / "log", {})
    os.close(listener)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await rank.exit
    assert str(rank.error) == "OSError: [Errno 88] Socket operation on non-socket"
