"""Why a call of a rank or router failed, in one line: what Ray's exceptions become."""

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from coatcheck.cluster.supervision import rank_end
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


def test_a_kill_at_a_memory_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the kernel has killed since the ranks were started adds the lowest limit and what to change; kills
    before that do not count."""
    monkeypatch.setattr(rank_end, "memory_kills", lambda: {300 << 20: 2, 900 << 20: 5})
    assert rank_end.describe_memory_kill({300 << 20: 2, 900 << 20: 5}) == ""
    clause = rank_end.describe_memory_kill({300 << 20: 1, 900 << 20: 4})
    assert rank_end.MEMORY_KILL in clause and "the container's limit is 300 MiB: raise the limit, or lower" in clause
