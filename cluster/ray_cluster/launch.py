"""Every process of a cluster and every channel between them. This is the only module that starts actors.

    client ──gRPC, HTTP──▶ router-0 ──gRPC (an Attach stream per group)─▶ rank 0 ══torch.distributed══ rank 1 …
                              ▲                                             ▲
                              └───────────── supervisor (Ray calls) ────────┘
                                                 ▲
                                         coatcheck serve (Ray calls)

    process      started by         number                   restarted by
    supervisor   coatcheck serve    1, at Ray's head         Ray
    router       supervisor         1, or 1 for each node    supervisor
    rank         supervisor         tp for each group        supervisor, with all other ranks of its group

Each process is a detached, named actor in one namespace, so that a new `coatcheck serve` or a restarted supervisor
finds it by name. actor_handles.py lists the calls that each answers. No token and no tensor passes through Ray.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Final, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from coatcheck.cluster.config.exposure import needs_cluster_certificates
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.actor_handles import RankHandle, RouterHandle, SupervisorHandle
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole, sign_certificates
from coatcheck.cluster.ray_cluster.placement_plan import Node, PlacementPlan
from coatcheck.cluster.ray_cluster.ray_connection import NAMESPACE
from coatcheck.cluster.ray_cluster.ray_kv import read_number, start_number_key
from coatcheck.proto.errors import InvalidConfig
from coatcheck.router.actor import RouterActor
from coatcheck.router.config import RouterConfig
from coatcheck.workers.actor import CONCURRENCY, RankActor
from coatcheck.workers.core.group_config import GroupConfig

SUPERVISOR: Final = "supervisor"
ROUTER: Final = "router-0"

_HEAD: Final = "node:__internal_head__"  # a resource that Ray gives to the head and to no other node
# Amount of a node resource that an actor takes. Small, so that a new actor can start before Ray has freed the share of
# a dead one.
_SMALL_SHARE: Final = 0.01


def start_supervisor(supervisor_class: type[Any], config: ServeConfig, plan: PlacementPlan) -> SupervisorHandle:
    """Start the supervisor at Ray's head. If the supervisor dies, Ray starts it again with the same arguments.

    The certificates are signed here, once, so that a restarted supervisor can talk to running routers and groups. The
    key of resume tickets is drawn here too, so that a restarted supervisor gives it to further routers.
    `supervisor_class` is `Supervisor`. The caller passes that class because `supervision` imports this module.
    """
    options = ray.remote(supervisor_class).options(
        name=SUPERVISOR,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=32,
        # The supervisor runs on the head, because without the head it could do nothing. It asks for the head's resource
        # and not for its node id, because a restarted head has another id.
        resources={_HEAD: _SMALL_SHARE},
    )
    certificates = sign_certificates() if needs_cluster_certificates(config) else CertificatesByRole()
    return cast(SupervisorHandle, options.remote(config, plan, certificates, secrets.token_bytes(32)))


def start_router(config: RouterConfig, resource: str | None = None, node: str | None = None) -> RouterHandle:
    """Start a router: the public gRPC service, OpenAI's API over HTTP, and a stream to rank 0 of every group.

    `node`: the id of the node to run on. Without it the router waits for any node that offers `resource`, if given.
    """
    actor_class: Any = RouterActor  # an actor class of Ray; type checkers see the plain class
    options = actor_class.options(
        name=config.name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=0,
        resources={resource: _SMALL_SHARE} if resource else None,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False) if node else None,
    )
    return cast(RouterHandle, options.remote(config))


def start_rank(
    config: GroupConfig,
    rank: int,
    start_number: int,
    incarnation: int,
    placement_group: PlacementGroup,
    *,
    rank_on_host: int,
    ranks_on_host: int,
    loopback: bool,
) -> RankHandle:
    """Start one rank of a group in its bundle of `placement_group`. Rank 0 also schedules and serves gRPC.

    Ray does not restart a rank alone: the ranks of a group end and start together. `start_number` is part of the
    actor's name; the other arguments: see RankActor.
    """
    bundle = placement_group.bundle_specs[rank]
    options = ray.remote(RankActor).options(
        name=_rank_name(config.name, start_number, rank),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        max_restarts=0,
        max_concurrency=CONCURRENCY,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank),
    )
    actor = options.remote(
        config, rank, incarnation, rank_on_host=rank_on_host, ranks_on_host=ranks_on_host, loopback=loopback
    )
    return cast(RankHandle, actor)


def kill_actor(actor: SupervisorHandle | RouterHandle | RankHandle) -> None:
    """Kill (SIGKILL) the actor's process. Ray does not restart it."""
    ray.kill(cast(Any, actor))


def find_supervisor() -> SupervisorHandle | None:
    """The supervisor that runs on this Ray cluster, if any."""
    return cast(SupervisorHandle | None, _find_actor(SUPERVISOR))


def find_router(name: str) -> RouterHandle | None:
    """The running router called `name`, if any."""
    return cast(RouterHandle | None, _find_actor(name))


def find_ranks(group: str, tp: int) -> tuple[int | None, list[RankHandle]]:
    """The number of the group's newest start (None if there was none), and the ranks of that start that still run, in
    order."""
    start_number = read_number(start_number_key(group))
    if start_number is None:
        return None, []
    found = [_find_actor(_rank_name(group, start_number, rank)) for rank in range(tp)]
    return start_number, [cast(RankHandle, actor) for actor in found if actor is not None]


def reserve_placement_group(group: str, bundle: Mapping[str, float], strategy: str, tp: int) -> PlacementGroup:
    """The placement group of a group, with one bundle for each rank. Creates it unless it exists.

    Ray reserves the bundles later: see PlacementGroup.wait. Raises InvalidConfig if the existing one has another size.
    """
    try:
        found: PlacementGroup = ray.util.get_placement_group(group)
    except ValueError:
        found = ray.util.placement_group([dict(bundle)] * tp, strategy, name=group, lifetime="detached")
    if found.bundle_count != tp:
        raise InvalidConfig(
            f"this Ray cluster still holds a placement group {group} of {counted(found.bundle_count, 'rank')}; "
            f"remove it, or serve with --tp {found.bundle_count}"
        )
    return found


def bundle_nodes(placement_group: PlacementGroup) -> list[str]:
    """The node id of each bundle. Empty until Ray has reserved all bundles, and while one of their nodes is lost."""
    table = placement_group_table(placement_group)
    return list(table["bundles_to_node_id"].values()) if table["state"] == "CREATED" else []


def free_resources() -> list[Node]:
    """The name and the free resources of each node."""
    from ray._private.state import available_resources_per_node  # public only as a command, `ray status`

    free = available_resources_per_node()  # type: ignore[no-untyped-call]
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    return [(names[id], resources) for id, resources in free.items()]


def router_nodes(resource: str | None) -> list[str]:
    """The ids of the nodes that may run a router: all live nodes, or those that offer `resource`."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if resource is None or node["Resources"].get(resource, 0) > 0]


def request_nodes(bundle: Mapping[str, float], ranks: int) -> None:
    """Ask Ray's autoscaler, if the cluster has one, for enough nodes to hold `ranks` bundles, used and free together.

    Each call replaces the last request. The request outlives this process until `ranks=0` withdraws it.
    """
    from ray.autoscaler.sdk import request_resources  # 0.07 s to import, and a cluster of a fixed size never asks

    request_resources(bundles=[dict(bundle)] * ranks)


def _rank_name(group: str, start_number: int, rank: int) -> str:
    """The actor name of a rank. Each start has its own names, because Ray frees a dead actor's name only after a
    while."""
    return f"{group}.{start_number}.rank-{rank}"


def _find_actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
