"""ClusterNotes: numbers that Ray keeps for a supervisor that comes back when nobody is left to ask.

How many groups a scaling has asked for, and how often each has been started. It does not know actors.
"""

from ray.experimental import internal_kv

_PREFIX = "coatcheck"
_GROUP_COUNT = f"{_PREFIX}/groups"


def incarnation_of(group: str) -> int | None:
    """The newest; None: it has had none."""
    noted: bytes | None = internal_kv._internal_kv_get(_incarnation_key(group))
    return None if noted is None else int(noted)


def note_incarnation(group: str, incarnation: int) -> None:
    """There is one more."""
    internal_kv._internal_kv_put(_incarnation_key(group), str(incarnation))


def forget_incarnations(group: str) -> None:
    """The group is no more."""
    internal_kv._internal_kv_del(_incarnation_key(group))


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


def _incarnation_key(group: str) -> str:
    return f"{_PREFIX}/{group}/incarnation"
