"""Where a rank writes how it ends: another user of the host can neither have a file emptied nor a rank held up."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.workers.host.crash_record import CrashRecord, read_crash

_STRANGER = 65534
_OPEN = (
    "import sys; from coatcheck.workers.host.crash_record import CrashRecord as R; R(sys.argv[1], 0, 1).open_record()"
)
_READ = "import sys; from coatcheck.workers.host.crash_record import read_crash; print(read_crash(sys.argv[1], [0], 1))"
_SECONDS = 60  # what would block, blocks for ever

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def run(code: str, base: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, str(base)], capture_output=True, text=True, timeout=_SECONDS, check=True
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder like Ray's for logs, where every user of the host may write."""
    (folder := tmp_path / "logs").mkdir()
    folder.chmod(0o777)
    return folder


def test_a_record_is_nobody_elses(logs: Path) -> None:
    """The folder of the records is made for this user alone, and so is each record."""
    base = logs / "coatcheck" / "g.0"
    run(_OPEN, base)
    (record,) = base.parent.iterdir()
    assert stat.S_IMODE(base.parent.stat().st_mode) == 0o700 and stat.S_IMODE(record.stat().st_mode) == 0o600
    assert read_crash(str(base), [0], 1) == ""


def test_a_record_of_a_former_cluster_is_replaced(logs: Path) -> None:
    """Incarnations of the next cluster in the same session have the same numbers; what the last one left is gone."""
    base = logs / "coatcheck" / "g.0"
    run(_OPEN, base)
    next(base.parent.iterdir()).write_text("ValueError: of the former one")
    run(_OPEN, base)
    assert read_crash(str(base), [0], 1) == ""


def test_a_link_empties_no_file(logs: Path, tmp_path: Path) -> None:
    """A link under the record's name leaves what it leads to as it was."""
    (victim := tmp_path / "victim").write_text("precious")
    (logs / "g.0.rank-0.crash").symlink_to(victim)
    told = run(_OPEN, logs / "g.0")
    assert victim.read_text() == "precious"
    assert "this rank has no crash record" in told.stderr
    assert read_crash(str(logs / "g.0"), [0], 1) is None, "what a stranger wrote is not believed"


def test_a_linked_folder_is_not_used(logs: Path, tmp_path: Path) -> None:
    """A link in the place of the records' folder has no record written elsewhere, and nothing removed there."""
    (elsewhere := tmp_path / "elsewhere").mkdir(mode=0o700)
    (precious := elsewhere / "g.0.rank-0.crash").write_text("precious")
    (logs / "coatcheck").symlink_to(elsewhere)
    run(_OPEN, logs / "coatcheck" / "g.0")
    assert precious.read_text() == "precious"
    assert read_crash(str(logs / "coatcheck" / "g.0"), [0], 1) is None


def test_a_fifo_does_not_block(logs: Path) -> None:
    """Neither the rank that would write into a FIFO nor the one that would read it waits for its other end."""
    os.mkfifo(logs / "g.0.rank-0.crash")
    assert "has no crash record" in run(_OPEN, logs / "g.0").stderr
    assert run(_READ, logs / "g.0").stdout == "None\n"


@as_root
def test_a_strangers_folder_is_not_used(logs: Path) -> None:
    """In a folder that another user has made beforehand, however private, no record is written and none is read."""
    (folder := logs / "coatcheck").mkdir(mode=0o700)
    (folder / "g.1.rank-0.crash").write_text("ValueError: a lie\n")
    os.chown(folder, _STRANGER, _STRANGER)
    told = run(_OPEN, folder / "g.0")
    assert f"{folder} belongs to user {_STRANGER}, not to user 0" in told.stderr
    assert [file.name for file in folder.iterdir()] == ["g.1.rank-0.crash"]
    assert read_crash(str(folder / "g.1"), [0], 1) is None


def test_a_full_disk_does_not_keep_a_rank_from_ending(tmp_path: Path) -> None:
    """A rank that cannot write its record still ends with its own error."""
    code = (
        "import resource, sys; from coatcheck.workers.host.crash_record import CrashRecord;"
        "record = CrashRecord(sys.argv[1], 0, 1); record.open_record();"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); record.record_error(ValueError('a defect'));"
        "print(record.describe_cause(ValueError('a defect')))"
    )
    told = run(code, tmp_path / "own" / "g.0")
    assert told.stdout == "rank 0: ValueError: a defect\n" and not told.stderr


def test_without_a_place_nothing_is_kept() -> None:
    """A rank outside Ray has no folder for records, and its error is known all the same."""
    record = CrashRecord("", 0, 1)
    record.open_record()
    record.record_error(ValueError("a defect"))
    assert record.describe_cause(ValueError("a defect")) == "rank 0: ValueError: a defect"
