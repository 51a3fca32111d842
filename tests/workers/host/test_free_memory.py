"""How much memory a rank says it may take."""

from pathlib import Path

import pytest

from coatcheck.workers.host.free_memory import container_free_bytes


def container(directory: Path, limit: str, used: int, idle: int) -> Path:
    """The files of a container's cgroup."""
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\nfile {idle + 7}\ninactive_file {idle}\nactive_file 7\n")
    return directory


@pytest.mark.parametrize(("limit", "used", "idle", "free"), [("100", 60, 0, 40), ("100", 90, 50, 60), ("50", 60, 0, 0)])
def test_files_that_were_only_read_do_not_count_as_taken(
    tmp_path: Path, limit: str, used: int, idle: int, free: int
) -> None:
    """A container's limit leaves what is used by nobody but the page cache, and never less than nothing."""
    assert container_free_bytes(container(tmp_path, limit, used, idle)) == free


def test_without_a_limit_the_host_decides(tmp_path: Path) -> None:
    """A container without a limit, and a host without cgroups, say nothing."""
    assert container_free_bytes(container(tmp_path, "max", 1, 0)) is None
    assert container_free_bytes(tmp_path / "absent") is None
