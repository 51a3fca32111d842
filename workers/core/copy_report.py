"""CopyReport: what all ranks of a group together say of the copies that plans have asked of them."""

from dataclasses import dataclass
from enum import IntEnum


class CopyStatus(IntEnum):
    """Of one copy: the group's is the least of its ranks'."""

    UNDER_WAY = 0
    BROKEN = 1  # what was read is not what had been written
    DONE = 2


@dataclass(frozen=True, slots=True)
class CopyReport:
    """`statuses`: one for each copy asked for and not yet reported as ended, oldest first.

    The seconds are those of one block on the slowest rank, lately; 0 where none was copied that way.
    """

    statuses: tuple[CopyStatus, ...]
    demote_seconds: float
    restore_seconds: float
