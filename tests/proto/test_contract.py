"""The contract number, and what values of one contract do when their versions differ by a field."""

import pickle
from dataclasses import dataclass

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.cluster_ca import CertificatesByRole
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState, GroupState
from coatcheck.cluster.ray_cluster.placement_plan import PlacementPlan
from coatcheck.proto.contract import CONTRACT, VERSION, contract_mismatch
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.router.actor import RouterReport
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import GroupListUpdate, GroupListVersion
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import RankProgress

# What Ray pickles between processes that may run different versions.
PICKLED = (
    ClusterState,
    GroupConfig,
    GroupEndpoint,
    GroupListUpdate,
    GroupListVersion,
    GroupState,
    ClusterCertificate,
    CertificatesByRole,
    PlacementPlan,
    RankProgress,
    RouterConfig,
    RouterReport,
)


def test_only_another_contract_is_refused() -> None:
    """Versions of one contract work together; a refusal names both versions, both contracts and what to do."""
    assert contract_mismatch("the group", CONTRACT, "9.9.9") == ""
    refusal = contract_mismatch("the group", CONTRACT + 1, "9.9.9")
    assert f"the group runs coatcheck 9.9.9 with contract {CONTRACT + 1}" in refusal
    assert f"this side {VERSION} with contract {CONTRACT}" in refusal and "install one version on every node" in refusal


@dataclass(frozen=True)
class Value:
    """A value of this version: `added` is not in the older one."""

    name: str
    added: int = 7


def test_a_missing_field_has_its_default() -> None:
    """A field that the pickle of an older version lacks has its default. The other fields keep their values."""
    older = Value("a", 1)
    del older.__dict__["added"]
    assert pickle.loads(pickle.dumps(older)) == Value("a", 7)


@pytest.mark.parametrize("kind", PICKLED)
def test_pickled_values_have_no_slots(kind: type) -> None:
    """Python pickles a dataclass with slots by position, so a field that is added would shift the others."""
    assert not hasattr(kind, "__slots__")


def test_values_come_through_whole() -> None:
    """A pickled value is equal to the original."""
    state = ClusterState((GroupState("group-0", ranks=(RankProgress(),)),), ("a:1",))
    assert pickle.loads(pickle.dumps(state)) == state


def test_the_settings_of_a_cluster_outlive_its_version() -> None:
    """A supervisor that is started again by a newer version has the defaults of settings that the older one lacked."""
    config = ServeConfig(model="m", tp=2, deterministic=True)
    assert pickle.loads(pickle.dumps(config)) == config
    _, (given,) = config.__reduce__()
    assert given == {"model": "m", "tp": 2, "deterministic": True}
