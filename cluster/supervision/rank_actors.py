"""RankActors: the Ray actors of one group. Starts, calls, watches and ends them; GroupSupervisor decides when.

The ranks of a group start together and end together: one start makes one actor for each rank.
"""

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.actor_handles import RankHandle
from coatcheck.cluster.ray_cluster.ray_connection import log_folder, node_id
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
from coatcheck.workers.host.disk_space import describe_full_disk

T = TypeVar("T")

# Ray ends the message of each unexpected death of a process with a list of possible causes. The kernel's out-of-memory
# killer is always in that list, so only the text before it can blame memory.
_CAUSES: Final = re.compile("potential root causes|common causes")

_STOP_SECONDS = 5.0
# A rank hangs if it has not answered a call after _WAITS waits of _WAIT_SECONDS. Several short waits instead of a long
# one: a supervisor that was suspended itself reads the answers before it has counted all waits.
_WAIT_SECONDS = 0.5
_WAITS = round(HANG_SECONDS / _WAIT_SECONDS)
_WAITS_WHILE_STARTING = 120  # a rank that imports torch answers nothing for a while


class RankNodes:
    """The nodes of the ranks of all groups. Ranks on one node share its CPU cores."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, ...]] = {}

    def set_nodes(self, group: str, nodes: Sequence[str]) -> None:
        """Record the node id of each rank of a group. `nodes` is empty for a removed group."""
        self._nodes[group] = tuple(nodes)

    def get_nodes(self, group: str) -> tuple[str, ...]:
        """The node id of each rank of the group; empty if the group has no nodes."""
        return self._nodes.get(group, ())

    def index_on_node(self, group: str, rank: int) -> int:
        """How many ranks of all groups come before this one on its node. 0 if the group has no nodes."""
        nodes = self.get_nodes(group)
        if rank >= len(nodes):
            return 0
        earlier = itertools.takewhile(lambda name: name != group, self._nodes)
        before = [*itertools.chain.from_iterable(self._nodes[name] for name in earlier), *nodes[:rank]]
        return before.count(nodes[rank])

    def max_ranks_per_node(self, group: str) -> int:
        """The largest number of ranks, over all groups, on any node of this group."""
        ranks = Counter(node for nodes in self._nodes.values() for node in nodes)
        return max((ranks[node] for node in self.get_nodes(group)), default=0)


class RankActors:
    """The actors of the group's newest start. `nodes` is updated when the group gets nodes."""

    def __init__(
        self, config: GroupConfig, placement_group: PlacementGroup, nodes: RankNodes, *, loopback: bool
    ) -> None:
        self.group = config.name
        self.tp = config.tp
        self._config = config
        self._placement_group = placement_group
        self._nodes = nodes
        self._loopback = loopback  # see RankActor
        self._actors: list[RankHandle] = []
        self._logs: list[str] = []
        self._exits: list[asyncio.Future[None]] = []  # one for each rank, done when the rank has ended
        self._have_served = False
        self._full_disks: tuple[str, ...] = ()  # RankProgress.full_disk of each rank, of the last progress
        self._memory_kills = memory_kills()  # at the start of the ranks

    @property
    def is_running(self) -> bool:
        """Whether `run_ranks` or `adopt_ranks` has succeeded and the ranks were not killed since."""
        return bool(self._exits)

    @property
    def are_requested(self) -> bool:
        """Whether Ray was asked for every rank of the newest start."""
        return len(self._actors) == self.tp

    def set_config(self, config: GroupConfig) -> None:
        """Use these settings from the next start on. The name and `tp` must be the same."""
        self._config = config

    async def adopt_ranks(self) -> tuple[int | None, tuple[RankProgress, ...]]:
        """Find the ranks that a former supervisor has started. If all of them serve, take them over; else kill them.

        Returns their start number (None if there was no start), and the progress of each rank that was taken over.
        """
        start_number, self._actors = launch.find_ranks(self.group, self.tp)
        self._have_served = True
        if len(self._actors) == self.tp:
            with suppress(RankEnded):
                await self._read_logs()
                progress = await self.read_progress()
                if _all_serve(progress):
                    self._exits = [asyncio.ensure_future(actor.watch.remote()) for actor in self._actors]
                    return start_number, progress
        self.kill_ranks()
        return start_number, ()

    async def find_nodes(self) -> bool:
        """Whether Ray holds a bundle for each rank. A lost node's bundles come back once another node has room."""
        nodes = await asyncio.to_thread(launch.bundle_nodes, self._placement_group)
        if nodes:
            self._nodes.set_nodes(self.group, nodes)
        return bool(nodes)

    async def start_ranks(self, start_number: int, incarnation: int) -> None:
        """Start the actors, named after `start_number`. They load nothing until `run_ranks`. Raises RankEnded."""
        ray_kv.write_number(ray_kv.start_number_key(self.group), start_number)
        self._have_served = False
        self._memory_kills = memory_kills()
        try:
            for rank in range(self.tp):
                actor = launch.start_rank(
                    self._config,
                    rank,
                    start_number,
                    incarnation,
                    self._placement_group,
                    rank_on_host=self._nodes.index_on_node(self.group, rank),
                    ranks_on_host=self._nodes.max_ranks_per_node(self.group),
                    loopback=self._loopback,
                )
                self._actors.append(actor)
        except ValueError as error:  # Ray has not freed the name of a former rank yet
            raise RankEnded(f"rank {len(self._actors)} could not start: {summarize_error(error)}") from None
        await self._read_logs()

    async def read_previous_crash(self) -> str | None:
        """How the incarnation before this one ended; see GroupEndpoint.previous_crash. Raises RankEnded."""
        crashes = await self._call_ranks([actor.previous_crash.remote() for actor in self._actors])
        return next((crash for crash in crashes if crash), None if None in crashes else "")

    async def run_ranks(self) -> None:
        """Make the ranks connect to each other, load the model and serve. Raises RankEnded."""
        (rendezvous,) = await self._call_ranks([self._actors[0].rendezvous.remote()])
        self._exits = [asyncio.ensure_future(actor.run.remote(rendezvous)) for actor in self._actors]

    async def read_progress(self) -> tuple[RankProgress, ...]:
        """The progress of each rank. Raises RankEnded if one has ended or hangs."""
        progress = tuple(await self._call_ranks([actor.progress.remote() for actor in self._actors]))
        self._have_served = self._have_served or _all_serve(progress)
        self._full_disks = tuple(rank.full_disk for rank in progress)
        return progress

    async def wait_for_exit(self, seconds: float) -> None:
        """Return after `seconds`. Raises RankEnded once a rank has ended. If several have ended, the error names one
        whose code raised an exception, if there is one."""
        if not (await asyncio.wait(self._exits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]:
            return
        first = next(rank for rank, ended in enumerate(self._exits) if ended.done())
        if not self._have_served:
            # While a group starts, a rank may end only because another rank has ended. Wait a second for that error.
            await asyncio.wait(self._exits, timeout=1.0)
        with_cause = (rank for rank, ended in enumerate(self._exits) if ended.done() and _cause_of(ended.exception()))
        rank = next(with_cause, first)
        raise RankEnded(self._explain_exit(rank, self._exits[rank].exception()))

    async def stop_ranks(self) -> None:
        """Let the current step end, then end the ranks. Kills ranks that have not ended after 5 s."""
        if self._actors:
            with suppress(RayError, TimeoutError):  # a rank that hangs does not answer
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._actors[0].stop.remote()
            if self._exits:
                await asyncio.wait(self._exits, timeout=_STOP_SECONDS)
        self.kill_ranks()

    def kill_ranks(self) -> None:
        for actor in self._actors:
            launch.kill_actor(actor)
        for ended in self._exits:
            ended.add_done_callback(_discard_result)
        self._actors, self._exits = [], []

    async def _read_logs(self) -> None:
        self._logs = await self._call_ranks([actor.log_file.remote() for actor in self._actors])
        self._full_disks = ()  # outdated: a process starts only if its disk has room

    async def _call_ranks(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        """The results of `calls`, one for each rank, from rank 0 on. Raises RankEnded for a rank that has ended or does
        not answer in time."""
        answers = [asyncio.ensure_future(call) for call in calls]
        pending = set(answers)
        waits = _WAITS if self._have_served else _WAITS_WHILE_STARTING
        try:
            for _ in range(waits):
                answered, pending = await asyncio.wait(pending, timeout=_WAIT_SECONDS)
                for answer in answered:
                    if error := answer.exception():
                        if self._exits:
                            await self.wait_for_exit(_WAIT_SECONDS)  # raises the error of the rank itself
                        rank = answers.index(answer)
                        raise RankEnded(f"rank {rank} has ended: {summarize_error(error)}{self._end_clauses(rank)}")
                if not pending:
                    return [answer.result() for answer in answers]
            rank = next(rank for rank, answer in enumerate(answers) if not answer.done())
            silence = f"it has not answered for {waits * _WAIT_SECONDS:g} s"
            raise RankEnded(f"rank {rank} hangs: {silence}{self._full_disk_clause(rank)}")
        finally:
            for answer in answers:
                answer.add_done_callback(_discard_result)

    def _explain_exit(self, rank: int, error: BaseException | None) -> str:
        """The message of a CoatcheckError as it is; any other error with the rank and its log file."""
        cause = _cause_of(error)
        if isinstance(cause, CoatcheckError):
            return str(cause)
        why = "" if cause else self._end_clauses(rank)
        what = f"{summarize_error(cause or error)}{why}"
        return describe_end(rank, what, self._logs[rank], show_tail=cause is None)

    def _end_clauses(self, rank: int) -> str:
        """Why a rank may have ended: a full disk, or the memory limit of this host's container; else ""."""
        nodes = self._nodes.get_nodes(self.group)
        is_here = rank < len(nodes) and nodes[rank] == node_id()
        return self._full_disk_clause(rank) + (describe_memory_kill(self._memory_kills) if is_here else "")

    def _full_disk_clause(self, rank: int) -> str:
        """ "; the disk ... is full ..." if a full disk may be why a rank ended or hangs; else "".

        The disk of this host is checked now. For another host the last progress of a rank there counts.
        """
        nodes = self._nodes.get_nodes(self.group)
        if rank >= len(nodes):
            return ""
        if nodes[rank] == node_id():
            why = describe_full_disk(log_folder())
        else:
            disks = zip(nodes, self._full_disks, strict=False)
            why = next((clause for node, clause in disks if clause and node == nodes[rank]), "")
        return f"; {why}" if why else ""


def _all_serve(progress: tuple[RankProgress, ...]) -> bool:
    return all(rank.phase is Phase.SERVING for rank in progress)


def _cause_of(error: BaseException | None) -> BaseException | None:
    """The exception that the rank's own code raised; None if its process died."""
    return error.cause if isinstance(error, RayTaskError) else None


def summarize_error(error: BaseException | None) -> str:
    """Why a call of an actor failed, in one line without Ray's explanations."""
    if error is None:
        return "it returned"
    if isinstance(error, RayError) and not isinstance(error, RayTaskError):
        if "memory" in _CAUSES.split(str(error), maxsplit=1)[0]:
            return "Ray ended its process because its node was out of memory"
        return PROCESS_DIED
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"


def _discard_result(done: "asyncio.Future[T]") -> None:
    """Read the exception, if any: asyncio logs an error for every exception that is never read."""
    if not done.cancelled():
        done.exception()
