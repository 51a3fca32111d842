"""Where ranks go, and what is said when there is no room."""

import pytest

from coatcheck.cluster.group_keeper import backoff_seconds
from coatcheck.cluster.placement import choose_placement
from coatcheck.proto.errors import InvalidConfig

GPU_NODE = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}
CPU_NODE = {"CPU": 4.0}


@pytest.mark.parametrize(
    ("device", "groups", "tp", "nodes", "placed"),
    [
        ("auto", 2, 2, [CPU_NODE], ("cpu", {"CPU": 1.0}, "STRICT_PACK")),
        ("auto", 2, 4, [GPU_NODE, CPU_NODE], ("cuda", {"GPU": 1.0}, "STRICT_PACK")),
        ("cpu", 2, 4, [GPU_NODE], ("cpu", {"CPU": 1.0}, "STRICT_PACK")),
        ("cuda", 1, 16, [GPU_NODE, GPU_NODE], ("cuda", {"GPU": 1.0}, "PACK")),
        ("cpu", 1, 8, [CPU_NODE, CPU_NODE], ("cpu", {"CPU": 1.0}, "PACK")),
    ],
)
def test_a_group_stays_on_one_node_where_one_can_hold_it(
    device: str, groups: int, tp: int, nodes: list[dict[str, float]], placed: tuple[str, dict[str, float], str]
) -> None:
    """GPUs are taken where there are any, one per rank, all on one node unless no node is large enough."""
    placement = choose_placement(device, groups, tp, nodes)
    assert (placement.device, placement.bundle, placement.strategy) == placed


@pytest.mark.parametrize(
    ("device", "nodes", "message"),
    [
        ("cuda", [CPU_NODE], r"need 8 GPUs, and this Ray cluster has 0 free on 1 node; lower --groups or --tp"),
        ("auto", [CPU_NODE], r"need 8 CPUs, and this Ray cluster has 4 free"),
        ("auto", [{**GPU_NODE, "GPU": 6.0}], r"need 8 GPUs, and this Ray cluster has 6 free"),
        ("cpu", [], r"need 8 CPUs, and this Ray cluster has 0 free on 0 nodes"),
    ],
)
def test_too_small_a_cluster_is_refused(device: str, nodes: list[dict[str, float]], message: str) -> None:
    """What is missing is said in numbers."""
    with pytest.raises(InvalidConfig, match=message):
        choose_placement(device, 2, 4, nodes)


def test_restarts_come_soon_and_then_slower() -> None:
    """The first restart waits half a second, each further one twice as long, none longer than half a minute."""
    waits = [backoff_seconds(failures) for failures in range(1, 12)]
    assert waits[0] == 0.5 and waits == sorted(waits) and waits[-1] == 30.0
