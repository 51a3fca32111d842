"""What each kind of Ray actor answers: the types of the handles that launch.py returns. Ray's own handles are untyped.

`handle.method.remote(...)` sends a call and returns an ObjectRef at once. Await it, or read it with `ray.get`.
"""

from typing import ParamSpec, Protocol, TypeVar

from ray import ObjectRef

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.actor import RouterReport
from coatcheck.router.groups.group_list import GroupListVersion
from coatcheck.workers.core.rank_progress import RankProgress

P = ParamSpec("P")
T = TypeVar("T")


class RemoteMethod(Protocol[P, T]):
    """One method of an actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> "ObjectRef[T]": ...


class SupervisorHandle(Protocol):
    """A handle of Supervisor (supervision/supervisor.py), for `coatcheck serve`, `restart` and `scale`."""

    get_contract: RemoteMethod[[], tuple[int, str]]
    get_config: RemoteMethod[[], ServeConfig]
    get_state: RemoteMethod[[], ClusterState]
    apply_config: RemoteMethod[[ServeConfig], str]
    find_missing_connection: RemoteMethod[[], str]
    drain_routers: RemoteMethod[[], bool]
    restart_group: RemoteMethod[[str, float], None]
    restart_router: RemoteMethod[[str, float], None]
    restart_supervisor: RemoteMethod[[], None]
    scale_groups: RemoteMethod[[int, float], None]
    stop_all: RemoteMethod[[bool], None]


class RouterHandle(Protocol):
    """A handle of RouterActor (router/actor.py), for the supervisor."""

    log_file: RemoteMethod[[], str]
    start: RemoteMethod[[], str]
    http_address: RemoteMethod[[], str]
    update_groups: RemoteMethod[[bytes], GroupListVersion]
    set_configuration: RemoteMethod[[str], None]
    status: RemoteMethod[[], StatusResponse]
    report: RemoteMethod[[], RouterReport | None]
    announce_drain: RemoteMethod[[], None]
    drain: RemoteMethod[[float | None], bool]
    undo_drain: RemoteMethod[[], None]
    stop: RemoteMethod[[], None]


class RankHandle(Protocol):
    """A handle of RankActor (workers/actor.py), for the supervisor."""

    log_file: RemoteMethod[[], str]
    previous_crash: RemoteMethod[[], str | None]
    rendezvous: RemoteMethod[[], str]
    run: RemoteMethod[[str], None]
    watch: RemoteMethod[[], None]
    progress: RemoteMethod[[], RankProgress]
    stop: RemoteMethod[[], None]
