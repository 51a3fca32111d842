"""GroupEndpoint: one group in the supervisor's list of groups for routers. Pickled between processes."""

from dataclasses import dataclass

STATES = ("starting", "serving", "draining", "lost")


@dataclass(frozen=True)
class GroupEndpoint:
    """`address`: HOST:PORT of the group's rank 0, "" while it has none. `state`: as the supervisor sees the group.

    `restarts`: number of starts after the first. `incarnation`: number of earlier starts in which the ranks came to
    run. `previous_crash`: how the incarnation before this one ended: its error if it crashed, "" if it was ended from
    outside, None if that is not known. `last_failure`: why the group was last restarted, in words; "" if it was not.
    """

    name: str
    address: str
    state: str = "serving"
    reason: str = ""
    restarts: int = 0
    incarnation: int = 0
    previous_crash: str | None = None
    last_failure: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a state that does not exist."""
        if self.state not in STATES:
            raise ValueError(f"a group's state is one of {STATES}, not {self.state!r}")
