"""Every process of a cluster and every channel between them, in one file.

    client ──gRPC, HTTP──▶ router-0 ──gRPC (one Attach stream a group)──▶ rank 0 ══torch.distributed══ rank 1 …
                              ▲                                             ▲
                              └───────────── supervisor (Ray calls) ────────┘
                                                 ▲
                                         coatcheck serve (Ray calls)

All but `coatcheck serve` are detached, named actors in one namespace, so that each is found again by whoever comes
back: the supervisor is restarted by Ray, ranks and routers by the supervisor. Ray starts and watches; no token passes
through it. This module does not know when any of these is called: see serve.py and supervisor.py.
"""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from coatcheck.cluster.config.exposure import needs_plane
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster import ray_kv as cluster_notes
from coatcheck.cluster.ray_cluster.cluster_ca import ClusterCA, PlaneCertificates
from coatcheck.cluster.ray_cluster.node_names import node_names
from coatcheck.cluster.ray_cluster.rank_placement import RankPlacement, Resources
from coatcheck.cluster.ray_cluster.ray_environment import TOKEN_HELP
from coatcheck.cluster.ray_cluster.ray_start import RayNotReady
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.router.actor import RouterActor
from coatcheck.router.config import RouterConfig
from coatcheck.workers.actor import CONCURRENCY, RankActor
from coatcheck.workers.core.group_config import GroupConfig

NAMESPACE = "coatcheck"
SUPERVISOR = "supervisor"
ROUTER = "router-0"

# Ray's smallest: no tensor and no token passes through its object store.
_OBJECT_STORE_BYTES = 80 << 20

_HEAD = "node:__internal_head__"  # a resource that Ray itself gives to the head
# Of its node's resource; small, so that the next router need not wait until Ray has taken the last one's back.
_SMALL_SHARE = 0.01

_QUIETLY: dict[str, Any] = dict(namespace=NAMESPACE, log_to_driver=False, configure_logging=False)

Actor = Any  # Ray's handles answer to whatever methods the class has


def connect(config: ServeConfig) -> None:
    """Connects to the cluster at `ray_address`, or starts a local Ray that ends with this process.

    Makes one attempt. Raises RayNotReady if another one may succeed, Unavailable or InvalidConfig if none will.
    """
    if config.ray_address:
        join(config.ray_address)
        return
    try:
        _start_ray(config)
    except (ValueError, TypeError, PermissionError) as error:
        raise Unavailable(f"Ray did not start: {_first_line(error)}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            raise Unavailable(f"Ray did not start: {_first_line(error)}; make room there, or set RAY_TMPDIR") from None
        raise RayNotReady("Ray did not start", _first_line(error)) from None
    except Exception as error:  # Ray raises plain Exception if a process starts too late
        raise RayNotReady("Ray did not start", _first_line(error)) from None


def join(address: str) -> None:
    """Connects to an existing cluster. Raises RayNotReady (an Unavailable) if none answers within Ray's time limit, and
    InvalidConfig if it runs other versions of Ray or Python."""
    try:
        ray.init(address=address, **_QUIETLY)
    except Exception as error:  # see `connect`
        if isinstance(error, AuthenticationError):
            raise Unavailable(f"the Ray cluster at {address} wants its token: {TOKEN_HELP}") from None
        if "ersion mismatch" in str(error):
            versions = " ".join(str(error).split())
            raise InvalidConfig(f"{versions}; install the same versions of Ray and Python on every node") from None
        what = f"no Ray cluster answers at {address}"
        if isinstance(error, ValueError | TypeError):
            raise Unavailable(f"{what}: {_first_line(error)}") from None
        raise RayNotReady(what, _first_line(error)) from None


def ray_address() -> str:
    """HOST:PORT of the head that this process has connected to."""
    return str(ray.get_runtime_context().gcs_address)


def log_folder() -> Path:
    """The folder of the logs of Ray's processes on this node."""
    from ray._private.worker import global_worker  # Ray has no public call for this

    node: Any = global_worker.node
    return Path(node.get_logs_dir_path())


def is_raylet_listening() -> bool:
    """Whether this process's raylet still accepts connections."""
    from ray._private.worker import global_worker  # Ray has no public call for this

    node: Any = global_worker.node
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(node.raylet_socket_name) == 0


def node_id() -> str:
    """The id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def _start_ray(config: ServeConfig) -> None:
    ray.init(
        address="local",
        # Logical: each rank on a CPU takes one, however many cores there are.
        num_cpus=max((config.max_groups or config.groups) * config.tp, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **_QUIETLY,
    )


def free_resources() -> dict[str, Resources]:
    """What each node of the cluster has free, by what the node is called."""
    from ray._private.state import available_resources_per_node  # public only as a command, `ray status`

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    nodes = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    names = node_names({id: nodes[id] for id in free})
    return {names[id]: free[id] for id in free}


def hosts_of(reserved: PlacementGroup) -> list[str]:
    """The node of each rank's place, by id; empty while Ray has none, or has lost one."""
    table = placement_group_table(reserved)
    return list(table["bundles_to_node_id"].values()) if table["state"] == "CREATED" else []


def find_actor(name: str) -> Actor | None:
    """The supervisor or a router that already runs on this cluster."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def start_supervisor(supervisor_class: type[Any], config: ServeConfig, placement: RankPlacement) -> Actor:
    """Start the cluster's supervisor. After a crash Ray starts another one with the same arguments.

    The certificates are signed here, once, so that a restarted supervisor can speak with processes that run already.
    `supervisor_class` is `Supervisor`. The caller passes that class because `supervision` imports this module.
    """
    options = ray.remote(supervisor_class).options(
        name=SUPERVISOR,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=32,
        # At the head: it ends with no worker node, and nothing is left to supervise without a head. A resource, since
        # affinity to a node that may be another is no more than a wish, and the head that comes back is another node.
        resources={_HEAD: _SMALL_SHARE},
    )
    plane = PlaneCertificates.signed_by(ClusterCA()) if needs_plane(config) else PlaneCertificates()
    return options.remote(config, placement, plane)


def reserve(group: str, bundle: Mapping[str, float], strategy: str, tp: int) -> PlacementGroup:
    """One placement group per group, one bundle per rank; found again if it is there."""
    try:
        found: PlacementGroup = ray.util.get_placement_group(group)
        if found.bundle_count != tp:
            raise InvalidConfig(
                f"this Ray cluster still holds a placement group {group} of {counted(found.bundle_count, 'rank')}; "
                f"remove it, or serve with --tp {found.bundle_count}"
            )
    except ValueError:
        found = ray.util.placement_group([dict(bundle)] * tp, strategy, name=group, lifetime="detached")
    return found


def ask_room(bundle: Mapping[str, float], ranks: int) -> None:
    """Of Ray's autoscaler, where it has one: nodes for so many ranks in all, used or not. The last word counts, and Ray
    keeps it beyond our end: whoever has asked says 0 then."""
    request_resources(bundles=[dict(bundle)] * ranks)


def start_rank(
    config: GroupConfig,
    rank: int,
    start: int,
    incarnation: int,
    reserved: PlacementGroup,
    *,
    ranks_on_host: int,
    loopback: bool,
) -> Actor:
    """One process: it computes, and as rank 0 schedules and serves. Never restarted alone: a group dies whole. `start`
    is the number in its name; for `incarnation` see RankActor."""
    bundle = reserved.bundle_specs[rank]
    options = ray.remote(RankActor).options(
        name=rank_name(config.name, start, rank),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        max_restarts=0,
        max_concurrency=CONCURRENCY,
        scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=rank),
    )
    return options.remote(config, rank, incarnation, ranks_on_host=ranks_on_host, loopback=loopback)


def start_router(config: RouterConfig, resource: str | None = None, node: str | None = None) -> Actor:
    """One process: the public gRPC service, OpenAI's endpoints over HTTP, and a stream to rank 0 of every group.

    On `node`, by its id, where one is named; else it waits for a node that offers `resource`, where one is named.
    """
    made_actor: Any = RouterActor  # Ray's decorator has made it an actor class, unknown to type checkers
    options = made_actor.options(
        name=config.name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        resources={resource: _SMALL_SHARE} if resource else None,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False) if node else None,
    )
    return options.remote(config)


def router_nodes(resource: str | None) -> list[str]:
    """Nodes that may have a router, by id: all that live, or of those the ones that offer `resource`."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if resource is None or node["Resources"].get(resource, 0) > 0]


def rank_name(group: str, start: int, rank: int) -> str:
    """An actor's name; each start has its own, since Ray frees a dead actor's name only after a while."""
    return f"{group}.{start}.rank-{rank}"


def find_ranks(group: str, tp: int) -> tuple[int | None, list[Actor]]:
    """The newest start of a group (None: it has had none), and those of its ranks that still run, in order."""
    newest = cluster_notes.start_of(group)
    if newest is None:
        return None, []
    found = [find_actor(rank_name(group, newest, rank)) for rank in range(tp)]
    return newest, [actor for actor in found if actor is not None]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_same(running: ServeConfig, wanted: ServeConfig) -> None:
    """Raises InvalidConfig unless the running cluster has the wanted settings. Ignored are the address, which has many
    spellings; the number of groups, which `coatcheck scale` changes; and the time limit of a start."""
    ignored = ("ray_address", "groups", "ray_start_timeout")
    if running != wanted.model_copy(update={name: getattr(running, name) for name in ignored}):
        raise InvalidConfig(
            f"this Ray cluster already serves {running.model_name} with other settings; "
            "stop that `coatcheck serve` first"
        )
