"""RankProgress: how far a rank has come, for whoever watches it start. Plain values without torch."""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """A rank's life, in order."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming up"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True)
class RankProgress:
    """`address` and what follows are known once the group serves; the address is rank 0's.

    `max_model_len` is the longest sequence that the group takes, `model_len` what it would be with a larger pool.
    `full_disk`: the result of describe_full_disk for the rank's host; "" if its disk is not full.
    """

    phase: Phase = Phase.STARTING
    done_bytes: int = 0
    total_bytes: int = 0
    address: str = ""
    num_blocks: int = 0
    max_model_len: int = 0
    model_len: int = 0
    dtype: str = ""
    full_disk: str = ""
