"""The cells of the routing benchmark: a workload at a cache size and a load, on groups of one kind, behind routers."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from coatcheck.bench.routing_simulation.service_model import ServiceModel

GROUPS = 8
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95)
SIZES = (3000, 1000, 10_000)
SMALL = 300  # blocks that hardly hold what a made-up workload shares: most of these fill no larger cache
ROUTERS = (2, 4, 16)
_TRACES = ("conversation", "synthetic", "azure")
_MADE_UP = (
    "shared prompt 0.5k", "shared prompt 4k", "shared prompt 20k",
    "shared prompt, long answers", "tenants", "retrieval", "agents", "chats", "flash crowd", "bursts", "long and short",
)  # fmt: skip
_FAMILIES = (*_TRACES, *_MADE_UP)
_VARIED = ("conversation", "shared prompt 4k", "tenants", "retrieval", "chats")  # also on unlike groups and routers


class Cluster(Enum):
    """How the groups of a cell differ from each other."""

    EQUAL = ""
    MIXED_SPEEDS = "mixed speeds"  # a quarter of the groups is half as fast
    MIXED_SIZES = "mixed sizes"  # half of the groups have twice the blocks, the others a third
    CHANGING = "changing"  # groups drain and join while requests come; the load counts all groups


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one cache size (`blocks` of each group) and one load. `routers` share the requests of our router
    and of rules behind our queue, each with its own view."""

    workload: str
    blocks: int
    load: float
    host_blocks: int = 0
    cluster: Cluster = Cluster.EQUAL
    routers: int = 1

    @property
    def name(self) -> str:
        host = f"+{self.host_blocks} host" if self.host_blocks else ""
        cluster = f"/{self.cluster.value}" if self.cluster.value else ""
        routers = f"/{self.routers} routers" if self.routers > 1 else ""
        return f"{self.workload}/{self.blocks}{host}/{self.load:g}{cluster}{routers}"

    def models(self, groups: int) -> list[ServiceModel]:
        """The service model of each group."""
        model = ServiceModel(blocks=self.blocks, host_blocks=self.host_blocks)
        if self.cluster is Cluster.MIXED_SPEEDS:
            slow = groups // 4
            return [model] * (groups - slow) + [model.slowed(2)] * slow
        if self.cluster is Cluster.MIXED_SIZES:
            large, small = replace(model, blocks=2 * self.blocks), replace(model, blocks=self.blocks // 3)
            return [large if place < groups // 2 else small for place in range(groups)]
        return [model] * groups


class Change(NamedTuple):
    """At a time, as a share of the run, a group begins or ceases to take requests."""

    when: float
    group: int
    serves: bool


# Of a cluster that changes, the last group joins late.
CHANGES = (
    Change(0.0, -1, False),
    Change(0.2, 0, False),
    Change(0.35, -1, True),
    Change(0.5, 1, False),
    Change(0.6, 0, True),
    Change(0.7, 2, False),
    Change(0.8, 1, True),
)


def _sizes(workload: str) -> tuple[int, ...]:
    # The Azure trace names no prefixes, so the size of the cache hardly matters to it.
    return (3000,) if workload == "azure" else SIZES


CELLS = (
    *(Cell(name, blocks, load) for blocks in SIZES for name in _FAMILIES if blocks in _sizes(name) for load in LOADS),
    *(Cell(name, 3000, load, routers=routers) for name in _VARIED for routers in ROUTERS for load in (0.5, 0.85)),
    *(
        Cell(name, 3000, load, cluster=cluster)
        for name in _VARIED
        for cluster in (Cluster.MIXED_SPEEDS, Cluster.MIXED_SIZES, Cluster.CHANGING)
        for load in LOADS
    ),
    *(Cell(name, SMALL, load) for name in _MADE_UP for load in LOADS),
    *(Cell(name, 1000, load, 4000) for name in ("conversation", "synthetic", "tenants") for load in (0.5, 0.85)),
)
