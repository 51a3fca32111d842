"""What `coatcheck serve` prints: the `ready:` line, the warning about slow ranks, the bars of ranks that start."""

import io

from rich.console import Console

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState, GroupState
from coatcheck.cluster.session.serve_lines import ProgressBars, niceness_warning, ready_line
from coatcheck.workers.core.rank_progress import Phase, RankProgress


def line(
    num_blocks: int,
    max_model_len: int,
    *,
    more_blocks: int = 100,
    http: tuple[str, ...] = (),
    numa_nodes: int = 1,
    numa_node: int | None = None,
) -> str:
    """The line for two groups, of which the first has `more_blocks` than the second."""
    config = ServeConfig.build({"model": "some/llama", "groups": 2, "block_size": 16})
    groups = [
        GroupState(
            name,
            state="serving",
            ranks=(
                RankProgress(
                    Phase.SERVING,
                    num_blocks=blocks,
                    max_model_len=max_model_len,
                    model_len=2048,
                    dtype="bfloat16",
                    numa_nodes=numa_nodes,
                    numa_node=numa_node,
                    kernels="native (avx2)",
                ),
            ),
        )
        for name, blocks in (("group-0", num_blocks + more_blocks), ("group-1", num_blocks))
    ]
    return ready_line(config, ClusterState(tuple(groups), ("10.0.0.1:50051",), http_addresses=http))


def test_the_line_has_addresses_and_sizes() -> None:
    """The group with the fewest blocks says how many sequences fit at once."""
    assert line(256, 2048, http=("10.0.0.1:8000",)) == (
        "ready: some/llama (bfloat16, native (avx2)) at 10.0.0.1:50051 and http://10.0.0.1:8000, 2 groups x tp 1, "
        "each with at least 256 blocks of 16 tokens, 2 sequences of 2048 tokens at once"
    )


def test_groups_of_one_size_have_exactly_that() -> None:
    """Groups with equally many blocks each have this number, not at least this number."""
    assert "2 groups x tp 1, each with 256 blocks of 16 tokens," in line(256, 2048, more_blocks=0)


def test_too_small_a_pool_is_said() -> None:
    """If the KV pool limits the sequence length, the line has both lengths and the setting to change."""
    assert line(5, 79).endswith(
        "5 blocks of 16 tokens, which is too few: no sequence can be longer than 79 tokens, and the model goes to "
        "2048; raise --kv-memory"
    )


def test_hosts_with_several_numa_nodes_are_told() -> None:
    """On such hosts the line says whether each rank has a node of its own, and what to change if not."""
    assert line(256, 2048, numa_nodes=2, numa_node=0).endswith("at once, each rank bound to a NUMA node")
    assert line(256, 2048, numa_nodes=2).endswith(
        "at once, ranks not bound to NUMA nodes: a host has 2 nodes and fewer ranks; raise --tp or --groups"
    )


def test_ranks_at_a_niceness_above_0_are_told() -> None:
    """One rank at nice 15 gives a warning that names the variable of `ray start`. Ranks at 0 and below give none."""

    def warning(*niceness: int) -> str:
        ranks = tuple(RankProgress(niceness=one) for one in niceness)
        return niceness_warning(ClusterState((GroupState("group-0", ranks=ranks),)))

    assert warning(0, -5) == warning() == ""
    assert warning(0, 15).startswith("Ray runs ranks at nice 15") and "RAY_worker_niceness=0" in warning(0, 15)


def test_a_rank_s_bar_shows_its_graphs() -> None:
    """While a rank captures CUDA graphs, its bar says how many of them it has."""
    warming = RankProgress(Phase.WARMING, 5, 5, captured_graphs=12, total_graphs=60)
    state = ClusterState((GroupState("group-0", ranks=(warming, RankProgress(Phase.LOADING, 1, 5))),))
    with ProgressBars(Console(force_terminal=True, file=io.StringIO())) as bars:
        bars.update_bars(state)
        phases = [task.fields["phase"] for task in bars.tasks]
    assert phases == ["warming up: 12 of 60 CUDA graphs", "loading"]
