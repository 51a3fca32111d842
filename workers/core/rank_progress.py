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
    """`address` and the fields after it are set once the group serves.

    `captured_graphs`, `total_graphs`: CUDA graphs, while the rank warms up. It captures all twice: first to measure
    what a step needs beside the KV pool.
    `address`: of rank 0. `max_model_len`: the longest sequence that the group accepts. `model_len`: the longest that it
    would accept with a larger KV pool. `kernels`: those in use, as GroupStatus has them. `full_disk`: the result of
    describe_full_disk for the rank's host; "" if there is room. `niceness`: of the rank's process, from -20 (scheduled
    first) to 19. `numa_nodes`: of the rank's host, 1 on GPUs. `numa_node`: the one that the rank is bound to; None: it
    is not bound.
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
