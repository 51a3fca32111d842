"""Numbers that a restarted supervisor reads from Ray's key-value store.

They are the number of groups that the last `coatcheck scale` asked for, and the number of each group's newest start.
"""

from ray.experimental import internal_kv

_PREFIX = "coatcheck"
_GROUP_COUNT = f"{_PREFIX}/groups"


def read_start_number(group: str) -> int | None:
    """The number of the group's newest start; None if it was never started."""
    return _read_number(_start_key(group))


def write_start_number(group: str, start: int) -> None:
    internal_kv._internal_kv_put(_start_key(group), str(start))


def delete_start_number(group: str) -> None:
    internal_kv._internal_kv_del(_start_key(group))


def read_group_count() -> int | None:
    """The number of groups that the last scaling asked for; None if the cluster was never scaled."""
    return _read_number(_GROUP_COUNT)


def write_group_count(groups: int) -> None:
    internal_kv._internal_kv_put(_GROUP_COUNT, str(groups))


def delete_group_count() -> None:
    internal_kv._internal_kv_del(_GROUP_COUNT)


def _read_number(key: str) -> int | None:
    value: bytes | None = internal_kv._internal_kv_get(key)
    return None if value is None else int(value)


def _start_key(group: str) -> str:
    return f"{_PREFIX}/{group}/start"
