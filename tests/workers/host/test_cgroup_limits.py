"""The limits of a container's cgroups, versions 1 and 2."""

import os
from pathlib import Path

import pytest

from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.host import cgroup_limits, numa, process_setup
from coatcheck.workers.host.cgroup_limits import cpu_quota, free_bytes, memory_kills

_NO_LIMIT = 9223372036854771712  # what version 1 shows without a limit


def hierarchy(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(mounted root, membership) of a process. `own`: what /proc/self/cgroup has; `files`: by path below the root."""
    for path, text in files.items():
        file = folder / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    (folder / "membership").write_text(f"{own}\n")
    return folder / "cgroup", folder / "membership"


def memory_v2(at: str, limit: str, used: int, idle: int) -> dict[str, str]:
    stat = f"anon 5\nfile {idle + 7}\ninactive_file {idle}\nactive_file 7"
    return {f"{at}memory.max": limit, f"{at}memory.current": str(used), f"{at}memory.stat": stat}


def memory_v1(at: str, limit: int, used: int, idle: int) -> dict[str, str]:
    return {
        f"memory/{at}memory.limit_in_bytes": str(limit),
        f"memory/{at}memory.usage_in_bytes": str(used),
        f"memory/{at}memory.stat": f"cache 9\ninactive_file 1\ntotal_inactive_file {idle}",
    }


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        pytest.param("0::/", memory_v2("", "100", 60, 0), 40, id="v2"),
        pytest.param("0::/", memory_v2("", "100", 90, 50), 60, id="v2-page-cache-is-free"),
        pytest.param("0::/", memory_v2("", "50", 60, 0), 0, id="v2-over-its-limit"),
        pytest.param("0::/", memory_v2("", "max", 1, 0), None, id="v2-no-limit"),
        pytest.param("0::/a/b", memory_v2("a/b/", "max", 1, 0) | memory_v2("a/", "70", 10, 0), 60, id="v2-above"),
        pytest.param("0::/a", memory_v2("a/", "70", 60, 0) | memory_v2("", "80", 75, 0), 5, id="v2-the-lowest"),
        pytest.param("0::/../../x", memory_v2("", "100", 60, 0), 40, id="v2-outside-its-namespace"),
        pytest.param(
            "0::/", memory_v2("", "100", 60, 0) | {"memory/x": "", "cgroup.controllers": "memory"}, 40, id="v2-a-name"
        ),
        pytest.param("4:memory:/a\n0::/", memory_v1("a/", 100, 90, 50), 60, id="v1"),
        pytest.param("4:cpuset,memory:/docker/7", memory_v1("", 100, 60, 0), 40, id="v1-without-a-namespace"),
        pytest.param("4:memory:/", memory_v1("", _NO_LIMIT, 60, 0), _NO_LIMIT - 60, id="v1-none"),
        pytest.param("", {}, None, id="no-cgroups"),
    ],
)
def test_free_memory_is_what_the_lowest_limit_leaves(
    tmp_path: Path, own: str, files: dict[str, str], free: int | None
) -> None:
    """The limits of a process's cgroup and of those above leave what only the page cache uses, and never less than
    nothing. Without a limit the host decides."""
    assert free_bytes(*hierarchy(tmp_path, own, files)) == free


@pytest.mark.parametrize(
    ("own", "files", "kills"),
    [
        pytest.param("0::/", {"memory.max": "100", "memory.events": "low 0\noom 4\noom_kill 3"}, {100: 3}, id="v2"),
        pytest.param("0::/", {"memory.max": "max", "memory.events": "oom_kill 3"}, {}, id="v2-no-limit"),
        pytest.param(
            "0::/a",
            {"a/memory.max": "50", "a/memory.events": "oom_kill 1", "memory.max": "70", "memory.events": "oom_kill 2"},
            {50: 1, 70: 2},
            id="v2-above",
        ),
        pytest.param(
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "100",
                "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
            },
            {100: 2},
            id="v1",
        ),
        pytest.param(
            "4:memory:/",
            {"memory/memory.limit_in_bytes": "100", "memory/memory.oom_control": "under_oom 0"},
            {},
            id="v1-does-not-count",
        ),
        pytest.param("", {}, {}, id="no-cgroups"),
    ],
)
def test_kills_at_a_memory_limit_are_counted(
    tmp_path: Path, own: str, files: dict[str, str], kills: dict[int, int]
) -> None:
    """By the limit, for the process's cgroup and those above that have one."""
    assert memory_kills(*hierarchy(tmp_path, own, files)) == kills


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        pytest.param("0::/", {"cpu.max": "150000 100000"}, 1.5, id="v2"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, None, id="v2-no-quota"),
        pytest.param("0::/a", {"a/cpu.max": "max 100000", "cpu.max": "200000 100000"}, 2.0, id="v2-above"),
        pytest.param(
            "3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5, id="v1"
        ),
        pytest.param(
            "3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, id="v1-no-quota"
        ),
        pytest.param("", {}, None, id="no-cgroups"),
    ],
)
def test_a_quota_in_cores(tmp_path: Path, own: str, files: dict[str, str], cores: float | None) -> None:
    """The lowest quota over its period, of the process's cgroup and those above."""
    assert cpu_quota(*hierarchy(tmp_path, own, files)) == cores


def test_threads_follow_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's threads are its share of the cores and of the quota, rounded down, at least one. A given number stays.
    So do they on a host whose ranks are bound to NUMA nodes."""
    for node, cores in enumerate(("0-31", "32-63")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(numa, "_threads", list)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    config = GroupConfig(name="g", model="m", served_model_name="m", device="cpu")
    for quota, ranks, threads in ((None, 2, 32), (8.5, 1, 8), (8.5, 2, 4), (0.5, 1, 1), (100.0, 2, 32)):
        for module in (process_setup, numa):
            monkeypatch.setattr(module, "cpu_quota", lambda quota=quota: quota)
        assert process_setup.divide_cores(0, ranks) == threads, quota
        assert process_setup.divide_cores(3, ranks) == 3
        if ranks == 2:
            assert numa.bind_rank(config, 0, ranks)[0].threads == threads, quota


def test_a_real_membership_is_read() -> None:
    """Reading this process's own cgroups raises nothing, and limits are positive."""
    assert (cgroup_limits.free_bytes() or 0) >= 0
    assert (cgroup_limits.cpu_quota() or 1) > 0
