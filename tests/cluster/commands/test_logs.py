"""`coatcheck logs`: the lines of Ray's files, each once, as they come, whatever happens to the files."""

import subprocess
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.commands.logs import LogFolder
from tests.cluster.running_server import COMMAND, coatcheck


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """The folder of logs that Ray's link leads to."""
    folder = tmp_path / "session_1" / "logs"
    folder.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_1")
    return folder


def test_the_lines_of_ranks_and_routers(session: Path) -> None:
    """Of standard error and standard output, and none of Ray's own processes; a last line may lack its newline."""
    (session / "worker-1-ffff-10.err").write_text("rank\nlast")
    (session / "worker-1-ffff-10.out").write_text("printed\n")
    (session / "raylet.out").write_text("Ray's own\n")
    done = coatcheck("logs", "--folder", str(session))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["last", "printed", "rank"]


def test_the_lines_of_a_cluster_without_ray(tmp_path: Path) -> None:
    """The folder that `serve --no-ray` names has other files; a folder without logs is an error that says what to
    give."""
    (tmp_path / "router.log").write_text("router\n")
    (tmp_path / "group-0-rank-1.log").write_text("rank\n")
    (tmp_path / "group-0.0.rank-1.crash").write_text("")
    done = coatcheck("logs", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "rank\nrouter\n")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "absent"):
        done = coatcheck("logs", "--folder", str(folder))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: there are no logs in {folder}; give the folder"), done.stderr


def test_each_line_is_read_once_and_whole(session: Path) -> None:
    """A line that is being written waits for its end; new files are found; deleted ones do no harm."""
    reader, file = LogFolder(session.parents[1] / "session_latest" / "logs"), session / "worker-a.err"
    assert list(reader.read_lines(whole=False)) == []
    file.write_text("one\ntw")
    assert list(reader.read_lines(whole=False)) == [b"one\n"]
    file.write_text("one\ntwo\n")
    (session / "worker-b.err").write_text("other\n")
    assert list(reader.read_lines(whole=False)) == [b"two\n", b"other\n"]
    file.unlink()
    assert list(reader.read_lines(whole=False)) == []


def test_a_ray_that_starts_again_has_another_folder(session: Path) -> None:
    """The link then leads there, and a file of an old name is read from its beginning. Without a link there is none."""
    latest = session.parents[1] / "session_latest"
    reader = LogFolder(latest / "logs")
    (session / "worker-a.err").write_text("first\n")
    assert list(reader.read_lines(whole=False)) == [b"first\n"]
    latest.unlink()
    assert list(reader.read_lines(whole=False)) == []
    again = session.parents[1] / "session_2" / "logs"
    again.mkdir(parents=True)
    (again / "worker-a.err").write_text("second\n")
    latest.symlink_to(again.parent)
    assert list(reader.read_lines(whole=False)) == [b"second\n"]


def test_following_ends_with_the_pod(session: Path) -> None:
    """Lines come out at once, and SIGTERM ends the command."""
    command = [*COMMAND, "logs", "--follow", "--folder", str(session)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        (session / "worker-a.err").write_text("now\n")
        assert following.stdout.readline() == "now\n"
        following.terminate()
        assert following.wait(MAX_WAIT_SECONDS) != 0
