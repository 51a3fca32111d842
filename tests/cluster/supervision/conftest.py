"""A supervisor whose ranks and routers are fakes."""

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
import ray

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole
from coatcheck.cluster.ray_cluster.placement_plan import plan_placement
from coatcheck.cluster.supervision import group_set, router_set, supervisor
from coatcheck.cluster.supervision.supervisor import Supervisor
from coatcheck.router.config import RouterConfig
from coatcheck.workers.core.group_config import GroupConfig
from tests.cluster.supervision.fake_ranks import FakeRanks
from tests.cluster.supervision.fake_router_actor import FakeRouterActor
from tests.cluster.supervision.supervised_cluster import NODES, Cluster


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Two groups of two ranks that serve."""
    cluster = Cluster()

    def start_router(config: RouterConfig, resource: str | None, node: str | None) -> FakeRouterActor:
        cluster.router = FakeRouterActor(config)
        return cluster.router

    def make_ranks(config: GroupConfig, placement_group: object, hosts: object, loopback: bool) -> FakeRanks:
        cluster.numbers[ray_kv.start_number_key(config.name)] = 0  # as the first start writes it
        return cluster.ranks.setdefault(config.name, FakeRanks(group=config.name))

    def reserve(name: str, bundle: object, strategy: str, tp: int) -> SimpleNamespace:
        cluster.placed.add(name)
        return SimpleNamespace(name=name, wait=lambda seconds: True)

    replacements: list[tuple[object, str, Callable[..., object]]] = [
        (supervisor, "configure_logging", lambda log_format, actor: None),
        (ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=False)),
        (ray.util, "remove_placement_group", lambda group: cluster.placed.discard(group.name)),
        (launch, "find_router", lambda name: None),
        (launch, "start_router", start_router),
        (launch, "kill_actor", lambda actor: setattr(actor, "is_dead", True)),
        (launch, "reserve_placement_group", reserve),
        (launch, "bundle_nodes", lambda placement_group: ["node"] * 2),
        (launch, "free_resources", lambda: NODES),
        (group_set, "RankActors", make_ranks),
        (ray_kv, "read_number", cluster.numbers.get),
        (ray_kv, "write_number", cluster.numbers.__setitem__),
        (ray_kv, "read_text", cluster.texts.get),
        (ray_kv, "write_text", cluster.texts.__setitem__),
        (ray_kv, "delete_value", lambda key: (cluster.numbers.pop(key, None), cluster.texts.pop(key, None))),
    ]
    for owner, name, replacement in replacements:
        monkeypatch.setattr(owner, name, replacement)
    for module, constant in [
        (group_set, "_CHECK_SECONDS"),
        (router_set, "_LOAD_SECONDS"),
        (router_set, "_WATCH_SECONDS"),
    ]:
        monkeypatch.setattr(module, constant, 0.01)
    config = ServeConfig.build({"model": "m", "groups": 2, "tp": 2})
    cluster.supervisor = Supervisor.__new__(Supervisor)
    plan = plan_placement("cpu", 2, 2, NODES)
    await cluster.supervisor.__init__(config, plan, CertificatesByRole())  # type: ignore[misc]  # as Ray awaits it
    await cluster.until_serving()
    yield cluster
    await cluster.supervisor.stop_all()
