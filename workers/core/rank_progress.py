"""RankProgress: how far a rank's start has come, for the supervisor. Imports no torch."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The phases of a rank, in order."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming up"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True)
class RankProgress:
    """`done_bytes`, `total_bytes`: of the weights, while the rank loads.

    `captured_graphs`, `total_graphs`: CUDA graphs, while the rank warms up. A rank captures every graph twice. The
    first capture measures the memory that a step needs beside the KV pool.

    Rank 0 sets these once the group serves:
    `address`: host:port of rank 0's gRPC service. `num_blocks`: of the KV pool.
    `max_model_len`: tokens of the longest sequence that the group accepts. `model_len`: the same if the KV pool set no
    limit. `dtype`: of the model. `kernels`: the text of `GroupStatus.kernels`.

    `full_disk`: the result of describe_full_disk for the rank's host; "" if there is room.
    `niceness`: of the rank's process, from -20 (scheduled first) to 19.
    `numa_nodes`: the number of NUMA nodes of the rank's host; 1 on GPUs. `numa_node`: the node that the rank is bound
    to; None if it is not bound.
    """

    phase: Phase = Phase.STARTING
    done_bytes: int = 0
    total_bytes: int = 0
    captured_graphs: int = 0
    total_graphs: int = 0
    address: str = ""
    num_blocks: int = 0
    max_model_len: int = 0
    model_len: int = 0
    dtype: str = ""
    kernels: str = ""
    full_disk: str = ""
    niceness: int = 0
    numa_nodes: int = 1
    numa_node: int | None = None

    @property
    def description(self) -> str:
        """The phase, and how many CUDA graphs are captured while there is something to capture."""
        if self.phase is Phase.WARMING and self.total_graphs:
            return f"{self.phase.value}: {self.captured_graphs} of {self.total_graphs} CUDA graphs"
        return self.phase.value
