"""RankActors: the processes of one group, as Ray has them: found, started, asked, watched and ended.

They live and die together. It does not know when any of this is called for, nor what is concluded from it: see
GroupSupervisor.
"""

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from coatcheck.cluster.ray_cluster import launch
from coatcheck.cluster.ray_cluster import ray_kv as cluster_notes
from coatcheck.cluster.supervision.rank_end import RankEnded, brief, cause_of
from coatcheck.cluster.supervision.rank_hosts import RankHosts
from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import Phase, RankProgress
from coatcheck.workers.host.disk_space import describe_full_disk

_STOP_SECONDS = 5.0
# How many waits for an answer, and how long ones, a rank may let pass. Several short ones: a supervisor that was itself
# held up finds the answers before it has counted them all.
_WAIT_SECONDS = 0.5
_WAITS = 6
# While it starts, a rank imports torch, which answers nobody for a while.
_WAITS_WHILE_STARTING = 120


class RankActors:
    """Of the last start; `loopback` is theirs (see RankActor), and `hosts` is kept current."""

    def __init__(self, config: GroupConfig, reserved: PlacementGroup, hosts: RankHosts, *, loopback: bool) -> None:
        self.group = config.name
        self.tp = config.tp
        self._config = config
        self._reserved = reserved
        self._hosts = hosts
        self._loopback = loopback
        self._actors: list[launch.Actor] = []
        self._logs: list[str] = []
        self._lives: list[asyncio.Future[None]] = []  # one per rank: done when it has ended
        self._have_served = False
        self._full_disks: tuple[str, ...] = ()  # by rank, of its last progress: see RankProgress.full_disk

    @property
    def have_begun(self) -> bool:
        """Whether there are any that run, or did until they ended by themselves."""
        return bool(self._lives)

    async def adopt(self) -> tuple[int | None, tuple[RankProgress, ...]]:
        """The number of the newest start that a former supervisor has made (None: there was none), and what its ranks
        say, if all of them serve; else what is left of them is ended."""
        number, self._actors = launch.find_ranks(self.group, self.tp)
        self._have_served = True
        if len(self._actors) == self.tp:
            with suppress(RankEnded):
                await self._read_logs()
                progress = await self.progress()
                if _all_serve(progress):
                    self._lives = [asyncio.ensure_future(actor.watch.remote()) for actor in self._actors]
                    return number, progress
        self.kill()
        return number, ()

    async def find_place(self) -> bool:
        """Whether Ray has one for each: a node may be gone, and another to come."""
        hosts = await asyncio.to_thread(launch.hosts_of, self._reserved)
        if hosts:
            self._hosts.note(self.group, hosts)
        return bool(hosts)

    async def start(self, number: int, incarnation: int) -> None:
        """Processes that wait to be told to run, under the names of this start. Raises RankEnded."""
        cluster_notes.note_start(self.group, number)
        self._have_served = False
        try:
            for rank in range(self.tp):
                actor = launch.start_rank(
                    self._config,
                    rank,
                    number,
                    incarnation,
                    self._reserved,
                    ranks_on_host=self._hosts.busiest(self.group),
                    loopback=self._loopback,
                )
                self._actors.append(actor)
        except ValueError as error:  # Ray has not freed the name of a former rank yet
            raise RankEnded(f"rank {len(self._actors)} could not start: {brief(error)}") from None
        await self._read_logs()

    async def predecessor_crash(self) -> str | None:
        """How the incarnation before theirs has ended; see GroupEndpoint. Raises RankEnded."""
        told: list[str | None] = await self._call_ranks(self._actors, "predecessor_crash")
        return next((words for words in told if words), None if None in told else "")

    async def begin(self) -> None:
        """Lets them meet, load and serve. Raises RankEnded."""
        (rendezvous,) = await self._call_ranks(self._actors[:1], "rendezvous")
        self._lives = [asyncio.ensure_future(actor.run.remote(rendezvous)) for actor in self._actors]

    async def progress(self) -> tuple[RankProgress, ...]:
        """How far each is; raises RankEnded for one that has ended or hangs."""
        progress: tuple[RankProgress, ...] = tuple(await self._call_ranks(self._actors, "progress"))
        self._have_served = self._have_served or _all_serve(progress)
        self._full_disks = tuple(rank.full_disk for rank in progress)
        return progress

    async def live(self, seconds: float | None = None) -> None:
        """Returns after that time; raises RankEnded once one has ended, with the best reason that any of them gives."""
        if not (await asyncio.wait(self._lives, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return
        first = next(rank for rank, life in enumerate(self._lives) if life.done())
        if not self._have_served:
            # While starting, one rank may only have lost another that knows more: its own word is worth a moment.
            await asyncio.wait(self._lives, timeout=1.0)
        told = [rank for rank, life in enumerate(self._lives) if life.done() and cause_of(life.exception())]
        rank = told[0] if told else first
        raise RankEnded(self._explain(rank, self._lives[rank].exception()))

    async def end(self) -> None:
        """First with a word, then without."""
        if self._actors:
            with suppress(RayError, TimeoutError):  # a rank that hangs does not hear it
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._actors[0].stop.remote()
            if self._lives:
                await asyncio.wait(self._lives, timeout=_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """At once."""
        for actor in self._actors:
            ray.kill(actor)
        for life in self._lives:
            # Its end is no longer news to anybody.
            life.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._actors, self._lives = [], []

    def forget(self) -> None:
        """The group is no more: if one of its name comes again, it is another."""
        cluster_notes.forget_starts(self.group)

    async def _read_logs(self) -> None:
        self._logs = await self._call_ranks(self._actors, "log_file")
        self._full_disks = ()  # outdated: these processes could start

    async def _call_ranks(self, actors: list[launch.Actor], method: str) -> list[Any]:
        """Every answer, in order; raises RankEnded for a rank that has ended, or has not answered in time."""
        answers = [asyncio.ensure_future(getattr(actor, method).remote()) for actor in actors]
        silent: set[asyncio.Future[Any]] = set(answers)
        waits = _WAITS if self._have_served else _WAITS_WHILE_STARTING
        try:
            for _ in range(waits):
                answered, silent = await asyncio.wait(silent, timeout=_WAIT_SECONDS)
                for answer in answered:
                    if error := answer.exception():
                        rank = answers.index(answer)
                        raise RankEnded(f"rank {rank} has ended: {brief(error)}{self._full_disk_clause(rank)}")
                if not silent:
                    return [answer.result() for answer in answers]
            rank = next(rank for rank, answer in enumerate(answers) if not answer.done())
            silence = f"it has not answered for {waits * _WAIT_SECONDS:g} s"
            raise RankEnded(f"rank {rank} hangs: {silence}{self._full_disk_clause(rank)}")
        finally:
            for answer in answers:
                # What it still has to say is no longer news to anybody.
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _explain(self, rank: int, error: BaseException | None) -> str:
        """A line for people: our own errors as they are, everything else with the rank."""
        cause = cause_of(error)
        if isinstance(cause, CoatcheckError):
            return str(cause)
        why = "" if cause else self._full_disk_clause(rank)
        return f"rank {rank} has ended: {brief(cause or error)}{why} (log: {self._logs[rank]})"

    def _full_disk_clause(self, rank: int) -> str:
        """ "; the disk ... is full ..." if a full disk may be why a rank ended or hangs; else "".

        The disk of this host is checked now. For another host, the last progress of any rank there says it.
        """
        hosts = self._hosts.of(self.group)
        if rank >= len(hosts):
            return ""
        if hosts[rank] == launch.node_id():
            why = describe_full_disk(launch.log_folder())
        else:
            told = zip(hosts, self._full_disks, strict=False)
            why = next((clause for host, clause in told if clause and host == hosts[rank]), "")
        return f"; {why}" if why else ""


def _all_serve(progress: tuple[RankProgress, ...]) -> bool:
    return all(rank.phase is Phase.SERVING for rank in progress)
