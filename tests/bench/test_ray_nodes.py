"""How a node of Ray is started for tests and benchmarks, without Ray."""

from pathlib import Path

import pytest

from coatcheck.bench.setup.ray_nodes import RayNode

# `sh -c` gives the output of the first start as $0.
_GIVES_UP_ONCE = """
if [ -e tried ]; then echo "Ray runtime started."; exec sleep 600; fi
touch tried; echo "$0"; exit 1
"""


@pytest.mark.parametrize(
    "output",
    ["Exception: The current node timed out during startup.", "Some Ray subprocesses exited unexpectedly:"],
)
def test_a_start_that_ray_gives_up_is_repeated(tmp_path: Path, output: str) -> None:
    """On a busy machine `ray start` gives up; the node is started again, and then runs."""
    node = RayNode(["sh", "-c", f"cd {tmp_path}; {_GIVES_UP_ONCE}", output], {}, tmp_path / "log")
    try:
        node.wait_started()
        assert node.runs()
    finally:
        node.kill()


def test_a_node_that_ends_otherwise_is_an_error(tmp_path: Path) -> None:
    """Any other end of `ray start` raises its output."""
    node = RayNode(["sh", "-c", "echo the port is taken; exit 3"], {}, tmp_path / "log")
    with pytest.raises(RuntimeError, match="ended with 3: the port is taken"):
        node.wait_started()
