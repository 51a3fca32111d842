"""What `coatcheck serve` prints: the progress of ranks, the `ready:` line, and a notice for each change of a group."""

import re
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState, GroupState, RouterState

# A router normally connects to a serving group in less time. After this time `serve` prints why it has not.
USUAL_CONNECT_SECONDS: Final = 3.0


@dataclass(frozen=True)
class Notice:
    """A line that `serve` prints. `reason`: the CamelCase reason of its Kubernetes event; "" if it is not an event."""

    line: str
    reason: str = ""
    is_warning: bool = False


def ready_line(config: ServeConfig, state: ClusterState) -> str:
    """The `ready:` line: the addresses for clients, and the capacity of the group with the fewest KV blocks."""
    rank = min((group.ranks[0] for group in state.groups), key=lambda rank: rank.num_blocks)
    longest, tokens = rank.max_model_len, rank.num_blocks * config.block_size
    http = f" and http{'s' if config.tls_cert else ''}://{state.http_addresses[0]}" if state.http_addresses else ""
    holds = f"{counted(rank.num_blocks, 'block')} of {config.block_size} tokens"
    if tokens < rank.model_len:
        holds += (
            f", which is too few: no sequence can be longer than {longest} tokens, and the model goes to "
            f"{rank.model_len}; raise --kv-memory"
        )
    else:
        at_once = counted(min(config.max_num_seqs, tokens // longest), "sequence")
        holds += f", {at_once} of {longest} tokens at once"
    groups = counted(len(state.groups), "group")
    are_equal = len({group.ranks[0].num_blocks for group in state.groups}) == 1
    each = "" if len(state.groups) == 1 else "each with " if are_equal else "each with at least "
    return (
        f"ready: {config.model_name} ({rank.dtype}, {rank.kernels}) at {state.grpc_addresses[0]}{http}, "
        f"{groups} x tp {config.tp}, {each}{holds}{_describe_numa(state)}"
    )


def _describe_numa(state: ClusterState) -> str:
    """A clause about hosts with several NUMA nodes; "" if there is none."""
    ranks = [rank for group in state.groups for rank in group.ranks]
    most = max(rank.numa_nodes for rank in ranks)
    if most == 1:
        return ""
    if all(rank.numa_nodes == 1 or rank.numa_node is not None for rank in ranks):
        return ", each rank bound to a NUMA node"
    return f", ranks not bound to NUMA nodes: a host has {most} nodes and fewer ranks; raise --tp or --groups"


def niceness_warning(state: ClusterState) -> str:
    """The warning that a joined Ray runs ranks at a niceness above 0; "" if it does not."""
    niceness = max((rank.niceness for group in state.groups for rank in group.ranks), default=0)
    if niceness <= 0:
        return ""
    return (
        f"Ray runs ranks at nice {niceness}, so any other process of their hosts delays every token; set "
        "RAY_worker_niceness=0 in the environment of `ray start` on every host"
    )


class ProgressBars(Progress):
    """A progress bar for each rank that loads weights, while the context is open. Shows nothing unless stderr is a
    terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._rank_tasks: dict[tuple[str, int], TaskID] = {}

    def update_bars(self, state: ClusterState) -> None:
        for group in state.groups:
            for rank, progress in enumerate(group.ranks):
                task = self._rank_tasks.get((group.name, rank))
                if task is None:
                    task = self.add_task(f"{group.name} rank {rank}", total=None, phase="")
                    self._rank_tasks[group.name, rank] = task
                total = progress.total_bytes or None
                self.update(task, completed=progress.done_bytes, total=total, phase=progress.description)


class GroupNotices:
    """Makes notices of groups that have changed. Keeps the last state of each group."""

    def __init__(self, state: ClusterState) -> None:
        self._known = {group.name: _comparable_state(group) for group in state.groups}

    def describe_changes(self, state: ClusterState) -> list[Notice]:
        """A notice for each group whose state or reason has changed, except groups that are starting."""
        notices = []
        for group in state.groups:
            if self._known.get(group.name) != _comparable_state(group) and group.state != "starting":
                self._known[group.name] = _comparable_state(group)
                line = f"{group.name} is {group.state}{_describe_cause(group)}"
                reason = f"Group{group.state.capitalize()}"
                notices.append(Notice(line, reason, is_warning=group.state in ("lost", "failed")))
        return notices


class RouterNotices:
    """Makes notices of routers that have changed. Keeps the last state of each router."""

    def __init__(self, state: ClusterState) -> None:
        self._known = {router.name: router for router in state.routers or ()}

    def describe_changes(self, state: ClusterState) -> list[Notice]:
        """A notice for each router that begins to serve, drains, ends, is lost, or is gone with its node."""
        if state.routers is None:  # the supervisor has just started again
            return []
        notices = []
        for router in state.routers:
            known = self._known.get(router.name)
            if router.state == "starting" or known == router:
                continue
            self._known[router.name] = router
            if known is None or _has_changed(known, router):
                reason = f"Router{router.state.capitalize()}"
                notices.append(Notice(_describe_router(router, known), reason, is_warning=router.state == "lost"))
        for name in self._known.keys() - {router.name for router in state.routers}:
            was_serving = self._known.pop(name).state == "serving"
            notices.append(Notice(f"{name} is gone with its node", "RouterRemoved", is_warning=was_serving))
        return notices


def without_brackets(text: str) -> str:
    """`text` without the parts in brackets (numbers, log files), which differ from one restart to the next."""
    return re.sub(r" \([^()]*\)", "", text)


def _describe_cause(group: GroupState) -> str:
    """Why a group is in its state, as a clause. For a group that serves again: why it was restarted, because a poll may
    have missed that it was lost."""
    if group.reason:
        return f": {group.reason}"
    return f" again; last restart: {group.last_failure}" if group.last_failure else ""


def _has_changed(known: RouterState, router: RouterState) -> bool:
    """Whether the state or reason differ, or `restarts` has grown: between two polls a router may be lost and serve
    again. A new supervisor counts restarts from 0, so a smaller number is no change."""
    before, now = ((one.state, without_brackets(one.reason)) for one in (known, router))
    return before != now or router.restarts > known.restarts


def _describe_router(router: RouterState, known: RouterState | None) -> str:
    if router.state == "lost":
        return f"{router.name} is lost: {router.reason}"
    if router.state == "ended":
        return f"{router.name} has ended while it drained"
    if router.state == "draining":
        return f"{router.name} is draining"
    if known is None:
        return f"another router at {router.address}"
    return f"{router.name} is serving again{f'; last restart: {router.last_failure}' if router.last_failure else ''}"


def _comparable_state(group: GroupState) -> tuple[str, ...]:
    return group.state, without_brackets(group.reason), without_brackets(group.last_failure)
