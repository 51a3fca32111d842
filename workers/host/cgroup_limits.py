"""Limits of this process's cgroup, version 1 or 2: memory and processor time.

In a container the system calls report the cores and memory of the host. The container's limits are those of its cgroup
and of that cgroup's parents; the lowest limit holds. In a container without a cgroup namespace /proc/self/cgroup has a
path of the host that does not exist in the container. The mounted root is then the container's own cgroup.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _MemoryFiles:
    """Names of a cgroup's files. `inactive`: the line of memory.stat with the inactive page cache. `kills`: the file
    that counts the processes that the kernel has killed for lack of memory."""

    limit: str
    used: str
    inactive: str
    kills: str


_MEMORY: Final = (
    _MemoryFiles("memory.max", "memory.current", "inactive_file", "memory.events"),
    _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
)


def free_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that this process may still allocate below the limits of its cgroups; None without a limit.

    Inactive page cache counts as free, because the kernel reclaims it first. Otherwise a checkpoint that was just read
    would count as used memory.
    """
    free = [_free_bytes(folder, files) for folder in _folders("memory", root, membership) for files in _MEMORY]
    return min((below for below in free if below is not None), default=None)


def memory_kills(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> dict[int, int]:
    """{memory limit in bytes: processes killed for lack of memory} of this process's cgroups, since they were created.
    Leaves out cgroups without a limit."""
    kills: dict[int, int] = {}
    for folder in _folders("memory", root, membership):
        for files in _MEMORY:
            if (counted := _read_kills(folder, files)) is not None:
                limit, count = counted
                kills[limit] = kills.get(limit, 0) + count
    return kills


def cpu_quota(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> float | None:
    """The lowest CPU quota of this process's cgroups, in cores; None without a quota."""
    quotas = [_quota(folder) for folder in _folders("cpu", root, membership)]
    return min((cores for cores in quotas if cores is not None), default=None)


def _folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The cgroups of `controller` that this process is in, from its own to the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    first = root / controller
    # Version 1 has a folder for each controller. In version 2 a folder of that name may be a cgroup.
    if first.is_dir() and not (root / "cgroup.controllers").exists():
        path = next((path for names, path in paths.items() if controller in names.split(",")), "/")
        top = first
    else:
        path, top = paths.get("", "/"), root
    inner = [part for part in path.split("/") if part]
    if ".." in inner:  # this process is outside the cgroup namespace of its mount
        inner = []
    for depth in range(len(inner), -1, -1):
        yield top.joinpath(*inner[:depth])


def _free_bytes(folder: Path, files: _MemoryFiles) -> int | None:
    try:
        limit, used = (int((folder / file).read_text()) for file in (files.limit, files.used))
        lines = (folder / "memory.stat").read_text().splitlines()
        inactive = next((int(line.split()[1]) for line in lines if line.startswith(f"{files.inactive} ")), 0)
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None
    return max(limit - max(used - inactive, 0), 0)


def _read_kills(folder: Path, files: _MemoryFiles) -> tuple[int, int] | None:
    """(limit in bytes, processes killed)"""
    try:
        limit = int((folder / files.limit).read_text())
        lines = (folder / files.kills).read_text().splitlines()
        return limit, next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):  # no such cgroup, "max", or a kernel that does not count
        return None


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such cgroup, or "max"
        return None
    return cores if cores > 0 else None  # version 1 writes -1 for no quota
