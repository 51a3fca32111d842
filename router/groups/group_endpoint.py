"""GroupEndpoint: what a supervisor tells a router about one group.

Plain and frozen, so that it crosses process borders. It does not know whether the group answers: a link finds out.
"""

from dataclasses import dataclass

STATES = ("starting", "serving", "draining", "lost")


@dataclass(frozen=True)
class GroupEndpoint:
    """A group by name, where its rank 0 listens ("" while it has no address), and its state as its owner sees it.

    `restarts`: how often it was started again. `incarnation`: in how many of its starts before this one its ranks came
    to run. `predecessor`: how the incarnation before this one has ended: in words where it did so by itself, "" where
    it was ended from outside, None where that is not known.
    """

    name: str
    address: str
    state: str = "serving"
    reason: str = ""
    restarts: int = 0
    incarnation: int = 0
    predecessor: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a state that does not exist."""
        if self.state not in STATES:
            raise ValueError(f"a group's state is one of {STATES}, not {self.state!r}")
