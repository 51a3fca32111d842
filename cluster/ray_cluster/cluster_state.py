"""ClusterState: the groups and routers of a cluster, as the supervisor reports them to `coatcheck serve`."""

from dataclasses import dataclass

from coatcheck.workers.core.rank_progress import Phase, RankProgress

_STAGES = {
    Phase.LOADING: "loading weights",
    Phase.WARMING: "warming up",
    Phase.SERVING: "waiting for the router",
}


@dataclass(frozen=True)
class GroupState:
    """One tensor-parallel group.

    `state` is "starting", "serving", "draining", "lost" (it will be started again) or "failed" (it has never served and
    is not started again; see `reason`). `restarts` counts every start after the first. `incarnation` and `predecessor`:
    see GroupEndpoint.
    """

    name: str
    state: str = "starting"
    address: str = ""
    reason: str = ""
    restarts: int = 0
    ranks: tuple[RankProgress, ...] = ()
    incarnation: int = 0
    predecessor: str | None = None


@dataclass(frozen=True)
class ClusterState:
    """`routers` and `http` are host:port of gRPC and HTTP. `routers` is empty until every router serves; `http` is also
    empty if HTTP is off. `failure`: why the cluster will never serve, else ""."""

    groups: tuple[GroupState, ...] = ()
    routers: tuple[str, ...] = ()
    failure: str = ""
    http: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether the routers and every group serve."""
        return bool(self.routers and self.groups) and all(group.state == "serving" for group in self.groups)

    @property
    def stage(self) -> str:
        """What the slowest rank does, in words; "" before any rank loads weights."""
        order = list(Phase)
        slowest = min((rank.phase for group in self.groups for rank in group.ranks), key=order.index, default=order[0])
        return _STAGES.get(slowest, "")
