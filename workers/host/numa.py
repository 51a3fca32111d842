"""Binds a rank on CPUs to a NUMA node, so that it reads weights and KV blocks from the memory of its own node.

A host with several sockets has several nodes. A core reads the memory of another node more slowly. With at least as
many ranks on a host as nodes, each rank runs on the cores of one node. Consecutive ranks, which exchange tensors, are
on the same node or on consecutive nodes. Linux allocates a page on the node whose core touches it first, so binding the
cores also places the memory. With fewer ranks than nodes a rank needs the cores of several nodes, and no rank is bound.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.host.cgroup_limits import cpu_quota

_NODES: Final = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class NumaNode:
    """`cores`: the logical CPUs of the node that this process may use; at least one."""

    number: int
    cores: frozenset[int]


@dataclass(frozen=True)
class NumaBinding:
    """`num_nodes`: the number of NUMA nodes of the host. `node`: the node that the rank is bound to; None if it is not
    bound. `sharing_ranks`: the number of ranks that are bound to `node`."""

    num_nodes: int = 1
    node: NumaNode | None = None
    sharing_ranks: int = 1

    @property
    def node_number(self) -> int | None:
        return None if self.node is None else self.node.number


def bind_rank(config: GroupConfig, rank_on_host: int, ranks_on_host: int) -> tuple[GroupConfig, NumaBinding]:
    """Bind this process to the node that `choose_binding` chooses, if the group runs on CPUs.

    Returns the settings with `threads` set to the rank's share of the node's cores (unless the operator set it), and
    the binding.
    """
    if config.device != "cpu":
        return config, NumaBinding()
    binding = choose_binding(read_nodes(_NODES, os.sched_getaffinity(0)), rank_on_host, ranks_on_host)
    if binding.node is None:
        return config, binding
    for thread in _threads():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread, binding.node.cores)
    threads = len(binding.node.cores) // binding.sharing_ranks
    if (quota := cpu_quota()) is not None:
        threads = min(threads, int(quota / ranks_on_host))
    return replace(config, threads=config.threads or max(1, threads)), binding


def _threads() -> list[int]:
    """The ids of this process's threads. All must be bound, because Ray runs an actor's methods in threads that it
    started before the actor."""
    return [int(name) for name in os.listdir("/proc/self/task")]


def choose_binding(nodes: Sequence[NumaNode], rank_on_host: int, ranks_on_host: int) -> NumaBinding:
    """The binding of the rank with index `rank_on_host` of `ranks_on_host`, counted over all groups."""
    if len(nodes) < 2 or ranks_on_host < len(nodes):
        return NumaBinding(num_nodes=max(len(nodes), 1))
    indices = [rank * len(nodes) // ranks_on_host for rank in range(ranks_on_host)]
    index = indices[rank_on_host % ranks_on_host]
    return NumaBinding(len(nodes), nodes[index], indices.count(index))


def read_nodes(folder: Path, allowed: Collection[int]) -> list[NumaNode]:
    """The nodes that have cores among `allowed`. `folder`: of Linux's sysfs; without it there are no nodes.

    Nodes without cores, such as memory behind CXL, are left out.
    """
    nodes = []
    for path in folder.glob("node[0-9]*"):
        try:
            cores = parse_cpu_list((path / "cpulist").read_text()) & frozenset(allowed)
        except (OSError, ValueError):
            continue
        if cores:
            nodes.append(NumaNode(int(path.name.removeprefix("node")), cores))
    return sorted(nodes, key=lambda node: node.number)


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of a list in Linux's form, such as 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
