"""EventProblem: what can be wrong with a group's KV events, as it is counted.

None of it ever makes a prefix that is not there: what is wrong is left out, or all that is known of the group is
forgotten until its next snapshot. It does not know who counts.
"""

from enum import Enum


class EventProblem(Enum):
    """By the event, but for GAP and IMPOSSIBLE, which are of a message."""

    UNKNOWN_GROUP = "unknown_group"  # it has not registered, or has left
    OTHER_EPOCH = "other_epoch"  # of an earlier incarnation
    BEFORE_SNAPSHOT = "before_snapshot"  # nothing counts until one has come
    REPEATED = "repeated"
    GAP = "gap"  # some are missing; a snapshot is asked for
    UNNAMED = "unnamed"  # no tier, or no block, that this contract has
    NO_PARENT = "no_parent"  # below a block that the group does not hold: it counts, and matches nothing until it does
    IMPOSSIBLE = "impossible"  # more blocks than the group has; it is ejected
