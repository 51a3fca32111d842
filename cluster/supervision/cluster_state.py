"""What a supervisor says of its cluster: plain, frozen values that cross processes."""

from dataclasses import dataclass

from coatcheck.workers.core.rank_progress import Phase, RankProgress


@dataclass(frozen=True)
class GroupState:
    """`state` is "starting", "serving", "draining", "lost" (and soon started again) or "failed" (it never served; see
    `reason`). `incarnation` and `predecessor`: see GroupEndpoint."""

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
    """`routers` and `http` are host:port, once clients may connect to all of them (`http` stays empty when there is
    none). `failure`: why the cluster will never serve, else empty. `contract` and `version` are the supervisor's."""

    groups: tuple[GroupState, ...] = ()
    routers: tuple[str, ...] = ()
    failure: str = ""
    http: tuple[str, ...] = ()
    contract: int = 0
    version: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether the routers and every group serve."""
        return bool(self.routers and self.groups) and all(group.state == "serving" for group in self.groups)

    @property
    def stage(self) -> str:
        """What the slowest rank does; empty while none has begun."""
        order = list(Phase)
        slowest = min((rank.phase for group in self.groups for rank in group.ranks), key=order.index, default=order[0])
        return {
            Phase.LOADING: "loading weights",
            Phase.WARMING: "warming up",
            Phase.SERVING: "waiting for the router",
        }.get(slowest, "")
