"""RankProcesses: the ranks of one group as child processes. Starts, asks, watches and ends them.

GroupSupervisor decides when. Without Ray this class takes the place of RankActors.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coatcheck.cluster.local.child_rank import ChildRank, wait_until_ended
from coatcheck.cluster.supervision.rank_end import (
    HANG_SECONDS,
    PROCESS_DIED,
    RankEnded,
    describe_end,
    describe_memory_kill,
)
from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.host.cgroup_limits import memory_kills
from coatcheck.workers.host.crash_record import read_crash
from coatcheck.workers.rank_process import RankStart

_STOP_SECONDS: Final = 5.0
_START_HANG_SECONDS: Final = 60.0  # while a rank starts it may import or load for longer than HANG_SECONDS
# Several short waits instead of a long one: a process that was suspended together with its ranks reads their answers
# before it has counted all waits.
_WAIT_SECONDS: Final = 0.5
_CAUSE_SECONDS: Final = 1.0  # when a rank ends while its group starts, wait this long for the error of another rank


class RankProcesses:
    """The processes of the group's newest start.

    `folder`: for logs and crash records; private to this user. `ranks_on_host`: ranks of all groups; `ranks_before`:
    those of the groups before this one. `gpus`: the GPU of each rank as CUDA_VISIBLE_DEVICES has it; empty on CPUs.
    """

    def __init__(
        self,
        config: GroupConfig,
        folder: Path,
        *,
        ranks_before: int,
        ranks_on_host: int,
        gpus: Sequence[str] = (),
    ) -> None:
        self.group = config.name
        self.tp = config.tp
        self._config = config
        self._folder = folder
        self._ranks_before = ranks_before
        self._ranks_on_host = ranks_on_host
        self._gpus = gpus
        self._ranks: list[ChildRank] = []
        self._incarnation = 0
        self._have_served = False
        self._memory_kills: dict[int, int] = {}  # at the start of the ranks

    @property
    def is_running(self) -> bool:
        """Whether the ranks were started, and not killed since."""
        return bool(self._ranks)

    async def adopt_ranks(self) -> tuple[int | None, tuple[RankProgress, ...]]:
        """(None, ()): there is nothing to adopt, because ranks end with the process that has started them."""
        return None, ()

    async def find_nodes(self) -> bool:
        """True: `coatcheck serve` has checked that this host has room."""
        return True

    async def start_ranks(self, start_number: int, incarnation: int) -> None:
        """Start the processes. They begin to load at once. Raises RankEnded."""
        self._have_served = False
        self._incarnation = incarnation
        self._memory_kills = memory_kills()
        try:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for rank in range(self.tp):
                    self._ranks.append(self._start_rank(rank, listener, incarnation))
        except OSError as error:  # too many open files, or no memory for another process: the next start may succeed
            raise RankEnded(f"rank {len(self._ranks)} could not start: {error}") from None

    async def read_previous_crash(self) -> str | None:
        """How the incarnation before this one ended; see GroupEndpoint.previous_crash."""
        return read_crash(self._record_base(self._incarnation - 1), list(range(self.tp)), self.tp)

    async def run_ranks(self) -> None:
        """Do nothing: the ranks run since `start_ranks`."""

    async def read_progress(self) -> tuple[RankProgress, ...]:
        """The progress of each rank. Raises RankEnded if one has ended or hangs."""
        answers = [rank.ask_progress() for rank in self._ranks]
        for answer in answers:
            answer.add_done_callback(_read_error)
        seconds = HANG_SECONDS if self._have_served else _START_HANG_SECONDS
        pending = set(answers)
        for _ in range(round(seconds / _WAIT_SECONDS)):
            _, pending = await asyncio.wait(answers, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            if not pending or any(answer.done() and answer.exception() for answer in answers):
                break
        if any(answer.done() and answer.exception() for answer in answers):
            await self.wait_for_exit(_CAUSE_SECONDS)
            raise RankEnded("a rank has closed its connection")
        if pending:
            rank = next(rank for rank, answer in enumerate(answers) if answer in pending)
            raise RankEnded(f"rank {rank} hangs: it has not answered for {seconds:g} s")
        progress = tuple(answer.result() for answer in answers)
        self._have_served = self._have_served or all(rank.phase is Phase.SERVING for rank in progress)
        return progress

    async def wait_for_exit(self, seconds: float) -> None:
        """Return after `seconds`. Raises RankEnded once a rank has ended. If several have, it is about one that has
        reported an error, if there is one."""
        exits = [rank.exit for rank in self._ranks]
        if not (await asyncio.wait(exits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return
        first = next(rank for rank, ended in enumerate(exits) if ended.done())
        if not self._have_served:
            await asyncio.wait(exits, timeout=_CAUSE_SECONDS)
        number = next((number for number, rank in enumerate(self._ranks) if rank.error is not None), first)
        raise RankEnded(self._explain_end(number))

    async def stop_ranks(self) -> None:
        """Let the current step end, then end the ranks. Kills ranks that have not ended after 5 s."""
        if self._ranks:
            self._ranks[0].send("stop")
            await wait_until_ended(self._ranks, _STOP_SECONDS)
        self.kill_ranks()

    def kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def _start_rank(self, rank: int, listener: socket.socket, incarnation: int) -> ChildRank:
        start = RankStart(
            self._config,
            rank,
            rendezvous=f"127.0.0.1:{listener.getsockname()[1]}",
            listener=listener.fileno() if rank == 0 else None,
            rank_on_host=self._ranks_before + rank,
            ranks_on_host=self._ranks_on_host,
            record_base=self._record_base(incarnation),
            parent=os.getpid(),
        )
        log = self._folder / f"{self.group}-rank-{rank}.log"
        environment = {"CUDA_VISIBLE_DEVICES": self._gpus[rank]} if self._gpus else {}
        return ChildRank.start(start, log, environment)

    def _explain_end(self, number: int) -> str:
        rank = self._ranks[number]
        if isinstance(rank.error, CoatcheckError):
            return str(rank.error)
        died = f"{PROCESS_DIED}{describe_memory_kill(self._memory_kills)}"
        what = str(rank.error) if rank.error is not None else died
        return describe_end(number, what, str(rank.log), show_tail=rank.error is None)

    def _record_base(self, incarnation: int) -> str:
        return str(self._folder / f"{self.group}.{incarnation}")


def _read_error(answer: asyncio.Future[RankProgress]) -> None:
    """asyncio logs an error for every exception that is never read, such as those of ranks that end after the first."""
    if not answer.cancelled():
        answer.exception()
