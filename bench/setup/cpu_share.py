"""A share of a core for a process: a cgroup with a quota, version 1 or 2.

Needs the right to make cgroups, which usually only root has.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PERIOD_US = 10_000  # short, so that a throttled process waits only briefly
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def cpu_share(pid: int, cores: float) -> Iterator[None]:
    """Limit a process to `cores` cores inside the context. Raises PermissionError if the cgroup cannot be made."""
    group = _make(f"share-{os.getpid()}-{pid}", round(cores * _PERIOD_US))
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(member)
        group.rmdir()


def _make(name: str, quota_us: int) -> Path:
    first = (_ROOT / "cpu" / "cpu.cfs_quota_us").parent
    parent = first if first.is_dir() else _ROOT
    group = parent / name
    try:
        group.mkdir()
    except OSError as error:
        raise PermissionError(f"cannot make the cgroup {group}: {error.strerror}; this needs root") from error
    if parent is first:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    return group
