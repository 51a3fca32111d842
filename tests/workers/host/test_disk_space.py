"""A full disk under Ray's folder is detected, and the message says what to do."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.workers.host.disk_space import describe_full_disk


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """The log folder of a session, on a small disk of its own."""
    (disk := tmp_path / "disk").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=64", "none", disk], capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        (logs := disk / "ray" / "session" / "logs").mkdir(parents=True)
        yield logs
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_is_full_where_nothing_can_be_written(logs: Path) -> None:
    """A disk filled to the last byte is full, and the message names Ray's folder; a disk with room is not full."""
    assert describe_full_disk(logs) == ""
    with pytest.raises(OSError, match="No space left"), (logs / "much").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert describe_full_disk(logs).startswith(
        f"the disk under {logs.parents[1]} on "
    ) and "is full (0 KiB free)" in describe_full_disk(logs)
    (logs / "much").unlink()
    assert describe_full_disk(logs) == ""


def test_a_disk_without_room_for_another_file_is_full(logs: Path) -> None:
    """A disk without free inodes is full, though bytes are free."""
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            (logs / str(number)).touch()
    assert "is full (no inodes free)" in describe_full_disk(logs)


def test_what_cannot_be_known_is_not_claimed(tmp_path: Path) -> None:
    """A missing folder counts as not full."""
    assert describe_full_disk(tmp_path / "gone") == ""
