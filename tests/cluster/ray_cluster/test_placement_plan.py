"""Placement of ranks, and the error if there is no room."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources, Node, plan_placement
from coatcheck.cluster.supervision.rank_actors import RankNodes
from coatcheck.proto.errors import InvalidConfig

GPU_NODE = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}
CPU_NODE = {"CPU": 4.0}


@pytest.mark.parametrize(
    ("device", "groups", "tp", "nodes", "placed"),
    [
        ("auto", 2, 2, [CPU_NODE], ("cpu", {"CPU": 1.0}, "SS")),
        ("auto", 2, 4, [GPU_NODE, CPU_NODE], ("cuda", {"GPU": 1.0}, "SS")),
        ("cpu", 2, 4, [GPU_NODE], ("cpu", {"CPU": 1.0}, "SS")),
        ("cuda", 1, 16, [GPU_NODE, GPU_NODE], ("cuda", {"GPU": 1.0}, "P")),
        ("cpu", 1, 8, [CPU_NODE, CPU_NODE], ("cpu", {"CPU": 1.0}, "P")),
        ("cpu", 3, 3, [CPU_NODE, {"CPU": 3.0}, {"CPU": 2.0}], ("cpu", {"CPU": 1.0}, "SSP")),
        ("cuda", 3, 6, [GPU_NODE, GPU_NODE, {"GPU": 4.0}], ("cuda", {"GPU": 1.0}, "SSP")),
    ],
)
def test_a_group_stays_on_one_node_where_one_can_hold_it(
    device: str, groups: int, tp: int, nodes: list[dict[str, float]], placed: tuple[str, dict[str, float], str]
) -> None:
    """Device auto uses GPUs if there are any. Each group is packed on one node as long as a node has room; the last
    groups are spread."""
    plan = plan_placement(device, groups, tp, named(nodes))
    initials = "".join(strategy[0] for strategy in plan.strategies)
    assert (plan.device, plan.bundle, initials) == placed


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), groups=st.integers(1, 6), tp=st.integers(1, 8))
def test_what_fits_is_placed_and_what_does_not_is_refused(sizes: list[int], groups: int, tp: int) -> None:
    """Groups fit if there are as many CPUs as ranks. As many groups as possible are packed on one node each."""
    nodes = named([{"CPU": float(size)} for size in sizes])
    if sum(sizes) < groups * tp:
        with pytest.raises(InvalidConfig, match=f": {groups * tp - sum(sizes)} missing"):
            plan_placement("cpu", groups, tp, nodes)
        return
    whole = min(groups, sum(size // tp for size in sizes))
    expected = ("STRICT_PACK",) * whole + ("PACK",) * (groups - whole)
    assert plan_placement("cpu", groups, tp, nodes).strategies == expected


@pytest.mark.parametrize(
    ("device", "nodes", "message"),
    [
        ("cuda", [CPU_NODE], r"need 8 GPUs, and this Ray cluster has 0 free on 1 node: 8 missing$"),
        ("auto", [CPU_NODE], r"need 8 CPUs, and this Ray cluster has 4 free on 1 node \(4 on node-0\): 4 missing"),
        ("auto", [{**GPU_NODE, "GPU": 6.0}, CPU_NODE], r"has 6 free on 2 nodes \(6 on node-0\): 2 missing"),
        ("auto", [CPU_NODE, {"CPU": 1.0}], r"5 free on 2 nodes \(4 on node-0, 1 on node-1\): 3 missing"),
        ("cpu", [{"CPU": 0.5}] * 7 + [{"CPU": 1.0}] * 3, r"\(1 on node-9, 1 on node-8, 1 on node-7\)"),
        ("cuda", [{"GPU": 1.0}] * 7, r"1 on node-0\): 1 missing$"),
        ("cpu", [], r"need 8 CPUs, and this Ray cluster has 0 free on 0 nodes: 8 missing"),
    ],
)
def test_too_small_a_cluster_is_refused(device: str, nodes: list[dict[str, float]], message: str) -> None:
    """The error gives the missing amount, and what is free on which node."""
    with pytest.raises(InvalidConfig, match=message):
        plan_placement(device, 2, 4, named(nodes))


@pytest.mark.parametrize(
    ("device", "own_ray", "at_start", "at_growth"),
    [
        ("cpu", False, "lower --groups or --tp, or add nodes", "ask for fewer, or add nodes"),
        ("cuda", False, "or add nodes, or use --device cpu", "ask for fewer, or add nodes"),
        ("cpu", True, "or serve on a Ray cluster with more (--ray-address)", "start it again with --groups 3, or with"),
        ("cuda", True, "(--ray-address), or use --device cpu", "of one host: serve on a Ray cluster with more"),
    ],
)
def test_what_helps_depends_on_who_asks(device: str, own_ray: bool, at_start: str, at_growth: str) -> None:
    """`serve` and `scale` give different advice for the same lack of resources. The error survives pickling, as Ray
    does it."""
    with pytest.raises(InsufficientResources) as raised:
        plan_placement(device, 1, 2, named([{"CPU": 1.0, "GPU": 1.0}]))
    lack = pickle.loads(pickle.dumps(raised.value))
    missing = f"1 group with tp 2 needs 2 {'GPU' if device == 'cuda' else 'CPU'}s, and this Ray cluster has 1 free"
    start, growth = str(lack.for_serve(own_ray=own_ray)), str(lack.for_scale(2, 3, own_ray=own_ray))
    assert start.startswith(missing) and at_start in start
    assert growth.startswith(f"2 groups serve, and more have no room: {missing}") and at_growth in growth


def named(nodes: list[dict[str, float]]) -> list[Node]:
    """The nodes, named node-0, node-1, ..."""
    return [(f"node-{number}", node) for number, node in enumerate(nodes)]


def test_nodes_of_one_name_are_two_nodes() -> None:
    """Nodes of the same name are counted and named one by one."""
    nodes = [("gpu-host", GPU_NODE), ("gpu-host", {"GPU": 4.0})]
    assert plan_placement("cuda", 3, 4, nodes).strategies == ("STRICT_PACK",) * 3
    with pytest.raises(InsufficientResources, match=r"12 free on 2 nodes \(8 on gpu-host, 4 on gpu-host\): 4 missing"):
        plan_placement("cuda", 4, 4, nodes)


def test_ranks_beside_a_group_are_counted_where_most_are() -> None:
    """A group is told the number of ranks, of all groups, on the fullest of its nodes, and each rank its index among
    those on its node. A group that is gone counts no more."""
    nodes = RankNodes()
    nodes.set_nodes("a", ["x", "y"])
    nodes.set_nodes("b", ["y", "y"])
    assert (nodes.max_ranks_per_node("a"), nodes.max_ranks_per_node("b"), nodes.max_ranks_per_node("c")) == (3, 3, 0)
    assert [nodes.index_on_node("a", rank) for rank in (0, 1)] == [0, 0]
    assert [nodes.index_on_node("b", rank) for rank in (0, 1, 2)] == [1, 2, 0]  # it has no third node yet
    nodes.set_nodes("b", [])
    assert nodes.max_ranks_per_node("a") == 1
