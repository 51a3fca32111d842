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
    is not started again; see `reason`). `restarts` counts every start after the first, so it is also the number
    of the newest start. `incarnation`, `previous_crash` and `last_failure`: see GroupEndpoint.
    """

    name: str
    state: str = "starting"
    address: str = ""
    reason: str = ""
    restarts: int = 0
    ranks: tuple[RankProgress, ...] = ()
    incarnation: int = 0
    previous_crash: str | None = None
    last_failure: str = ""


@dataclass(frozen=True)
class RouterState:
    """One router.

    `state` is "starting" (it has not served yet), "serving", "draining" (it refuses new requests, or will in a few
    seconds), "ended" (after its drain) or "lost" (`reason` says why). A router that has ended or is lost is started
    again while its node is alive. `restarts` counts these starts. `last_failure`: why the previous process was lost; ""
    if it ended after its drain.
    """

    name: str
    state: str = "starting"
    address: str = ""
    reason: str = ""
    restarts: int = 0
    last_failure: str = ""


@dataclass(frozen=True)
class ClusterState:
    """`grpc_addresses` and `http_addresses`: host:port of each router. The first is empty until every router serves.

    `failure`: why the cluster will never serve, else "". `configuration`: see ConfigRollout.status. `obstacle`: why the
    last step of a rollout failed, else ""; `configuration` contains it. `routers`: None without Ray, and until the
    supervisor has read the list of nodes.
    """

    groups: tuple[GroupState, ...] = ()
    grpc_addresses: tuple[str, ...] = ()
    failure: str = ""
    http_addresses: tuple[str, ...] = ()
    configuration: str = ""
    obstacle: str = ""
    routers: tuple[RouterState, ...] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the routers and every group serve."""
        return bool(self.grpc_addresses and self.groups) and all(group.state == "serving" for group in self.groups)

    @property
    def stage(self) -> str:
        """What the slowest rank does, for a progress line; "" until every rank loads weights."""
        order = list(Phase)
        slowest = min((rank.phase for group in self.groups for rank in group.ranks), key=order.index, default=order[0])
        return _STAGES.get(slowest, "")
