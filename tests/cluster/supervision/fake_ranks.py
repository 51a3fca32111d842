"""FakeRanks: stands in for RankActors in the tests of GroupSupervisor. No process and no Ray.

The script says how each start goes: "serves", "ends early" (before the ranks run) or "ends late" (before they serve).
Like real ranks they leave a record of how they ended, under the number of their incarnation.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from coatcheck.cluster.supervision.rank_end import PROCESS_DIED, RankEnded
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import Phase, RankProgress

SERVING = RankProgress(Phase.SERVING, address="127.0.0.1:1")


class FakeRanks:
    """`adopted` is what `adopt_ranks` returns. After the script every start serves. `starts` has the start number
    and the incarnation of each."""

    tp = 2

    def __init__(
        self,
        script: Iterable[str] = (),
        *,
        adopted: tuple[int | None, tuple[RankProgress, ...]] = (None, ()),
        group: str = "g",
    ) -> None:
        self.group = group
        self.starts: list[tuple[int, int]] = []
        self.graceful_stops = self.checks = 0
        self.is_running = bool(adopted[1])
        self._adopted = adopted
        self.config: GroupConfig | None = None  # the newest that `set_config` was given
        self._script = list(script)
        self._records: dict[int, str] = {}
        self._kind = "serves"
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def are_requested(self) -> bool:
        """As of RankActors, if every rank starts at once."""
        return bool(self.starts)

    def crash(self, words: str) -> None:
        """End the ranks. `words`: the crash record; "" if something killed them."""
        self._records[self.starts[-1][1]] = words
        self._end.set_exception(RankEnded(f"rank 1 has ended: {words or PROCESS_DIED}"))

    async def adopt_ranks(self) -> tuple[int | None, tuple[RankProgress, ...]]:
        return self._adopted

    def set_config(self, config: GroupConfig) -> None:
        self.config = config

    async def find_nodes(self) -> bool:
        return True

    async def start_ranks(self, start_number: int, incarnation: int) -> None:
        self.starts.append((start_number, incarnation))
        self._kind = self._script.pop(0) if self._script else "serves"
        self._end = asyncio.get_running_loop().create_future()
        if self._kind == "ends early":
            raise RankEnded("rank 0 could not start: ValueError: the name is taken")

    async def read_previous_crash(self) -> str | None:
        return self._records.get(self.starts[-1][1] - 1)

    async def run_ranks(self) -> None:
        self.is_running = True

    async def wait_for_exit(self, seconds: float) -> None:
        if self._kind == "ends late":
            self._records[self.starts[-1][1]] = "rank 0: OutOfMemoryError"
            raise RankEnded("rank 0 has ended: out of memory")
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._end), seconds)

    async def read_progress(self) -> tuple[RankProgress, ...]:
        self.checks += 1
        return (SERVING,) * self.tp

    async def stop_ranks(self) -> None:
        self.graceful_stops += 1
        self._records[self.starts[-1][1]] = ""
        self.kill_ranks()

    def kill_ranks(self) -> None:
        self.is_running = False
