"""CopyReport: the progress of the copies between tiers, over all ranks of a group."""

from dataclasses import dataclass
from enum import IntEnum


class CopyStatus(IntEnum):
    """The status of one copy. A group's status is the minimum over its ranks."""

    IN_PROGRESS = 0
    CORRUPT = 1  # the checksum of the bytes read is not that of the bytes written
    DONE = 2


@dataclass(frozen=True, slots=True)
class CopyReport:
    """`statuses`: of every copy that was planned and has not been reported as ended, oldest first.

    `demote_seconds`, `restore_seconds`: recent time per block on the slowest rank; 0 if none was copied that way.
    """

    statuses: tuple[CopyStatus, ...]
    demote_seconds: float
    restore_seconds: float
