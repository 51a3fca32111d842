"""ClusterNotes: numbers that Ray keeps for a supervisor that comes back when nobody is left to ask.

How many groups a scaling has asked for, and how often each has been started. It does not know actors.
"""

from ray.experimental import internal_kv

_PREFIX = "coatcheck"
_GROUP_COUNT = f"{_PREFIX}/groups"


def start_of(group: str) -> int | None:
    """The number of the newest; None: it has had none."""
    noted: bytes | None = internal_kv._internal_kv_get(_start_key(group))
    return None if noted is None else int(noted)


def note_start(group: str, start: int) -> None:
    """There is one more."""
    internal_kv._internal_kv_put(_start_key(group), str(start))


def forget_starts(group: str) -> None:
    """The group is no more."""
    internal_kv._internal_kv_del(_start_key(group))


def note_group_count(groups: int) -> None:
    """A scaling has asked for so many."""
    internal_kv._internal_kv_put(_GROUP_COUNT, str(groups))


def group_count() -> int | None:
    """None: no scaling has asked for any number."""
    noted: bytes | None = internal_kv._internal_kv_get(_GROUP_COUNT)
    return None if noted is None else int(noted)


def forget_group_count() -> None:
    """The next start has as many as it is told."""
    internal_kv._internal_kv_del(_GROUP_COUNT)


def _start_key(group: str) -> str:
    return f"{_PREFIX}/{group}/incarnation"  # as former versions call it
