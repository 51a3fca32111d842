"""Why a call of a rank or router failed, in one line: what Ray's exceptions become."""

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from coatcheck.cluster.supervision.rank_actors import summarize_error
from coatcheck.cluster.supervision.rank_end import PROCESS_DIED

_EXIT = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("error", "said"),
    [
        # Ray 2.60, then Ray 2.50: each lists the kernel's killer after the death of any process.
        (
            RayActorError(
                error_msg=f"{_EXIT}connection error code 2. Some common causes include: (1) high memory usage"
            ),
            PROCESS_DIED,
        ),
        (RayActorError(error_msg=f"{_EXIT}There are some potential root causes. (1) high memory usage"), PROCESS_DIED),
        (OutOfMemoryError("the node was running low on memory"), "Ray ended its process because its node was out of"),
        (ValueError("first\nlast line"), "ValueError: last line"),
        (None, "it returned"),
    ],
)
def test_why_a_call_failed(error: RayError | ValueError | None, said: str) -> None:
    """A process that died is not said to have run out of memory unless Ray's own monitor ended it."""
    assert summarize_error(error).startswith(said)
