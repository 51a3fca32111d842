"""What a supervisor says of its cluster: plain, frozen values that cross processes."""

from dataclasses import dataclass

from ..workers.rank_progress import RankProgress


@dataclass(frozen=True, slots=True)
class GroupState:
    """`state` is "starting", "serving", "lost" (and soon started again) or "failed" (it never served; see `reason`)."""

    name: str
    state: str = "starting"
    address: str = ""
    reason: str = ""
    restarts: int = 0
    ranks: tuple[RankProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`router` and `http` are host:port once clients may connect (`http` stays empty when there is none). `failure`:
    why the cluster will never serve, else empty."""

    groups: tuple[GroupState, ...] = ()
    router: str = ""
    failure: str = ""
    http: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether the router and every group serve."""
        return bool(self.router and self.groups) and all(group.state == "serving" for group in self.groups)
