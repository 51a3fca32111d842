"""The process of a rank that `coatcheck serve --no-ray` starts before it knows its settings."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster import early_process
from coatcheck.cluster.early_process import EarlyProcess, start_early_process
from coatcheck.cluster.local.child_rank import ChildRank
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.rank_process import RankStart
from tests.cluster.running_server import until
from tests.cluster.serving import Serving, lives, still_running


@pytest.fixture
def early() -> Iterator[EarlyProcess]:
    """The process of a command line that begins a cluster without Ray."""
    start_early_process(["serve", "model", "--no-ray"])
    early = early_process._processes[0]
    yield early
    early_process._processes.clear()
    early.kill()


def rank_start(folder: Path, *, threads: int = 0, ranks_on_host: int = 1, device: str = "cpu") -> RankStart:
    """A start that fails once the rank loads its model, because the folder has none."""
    return RankStart(
        GroupConfig("g", str(folder / "nothing"), "m", device=device, threads=threads),
        rank=0,
        rendezvous="127.0.0.1:1",
        listener=None,
        rank_on_host=0,
        ranks_on_host=ranks_on_host,
        record_base=str(folder / "record"),
        parent=os.getpid(),
    )


async def test_the_only_rank_runs_in_it(tmp_path: Path, early: EarlyProcess) -> None:
    """The rank has the process's id. Its error reaches the parent, and its output is in the log."""
    rank = ChildRank.start(rank_start(tmp_path), tmp_path / "log", {})
    assert rank._process.pid == early.process.pid
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await rank.exit
    assert "nothing" in str(rank.error)
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "start", [{"threads": 4096}, {"ranks_on_host": 2}, {"device": "cuda"}], ids=["threads", "ranks", "a GPU"]
)
async def test_other_ranks_are_started_as_usual(tmp_path: Path, early: EarlyProcess, start: dict[str, int]) -> None:
    """A rank with other threads, beside other ranks or on a GPU gets a process of its own, and the early one ends."""
    rank = ChildRank.start(rank_start(tmp_path, **start), tmp_path / "log", {})  # type: ignore[arg-type]
    assert rank._process.pid != early.process.pid and early.process.returncode == -signal.SIGKILL
    rank.kill()
    await rank.exit


async def test_a_process_that_has_ended_is_not_used(tmp_path: Path, early: EarlyProcess) -> None:
    """If the early process was killed, the rank starts in a new one."""
    early.process.kill()
    early.process.wait()
    rank = ChildRank.start(rank_start(tmp_path), tmp_path / "log", {})
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await rank.exit
    assert "nothing" in str(rank.error)


@pytest.mark.parametrize("line", ["generate --no-ray", "serve model", "serve --no-ray --help"])
def test_other_commands_start_none(line: str) -> None:
    """Only a command line that begins a cluster without Ray starts the process."""
    start_early_process(line.split())
    assert not early_process._processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_does_not_outlive_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """The early process ends with a `serve` that is stopped before its ranks start, here while it reads its settings
    from a FIFO that nobody writes."""
    settings = tmp_path / "settings.yaml"
    os.mkfifo(settings)
    with Serving("model", "--no-ray", "--config", str(settings)) as serving:
        until(lambda: len(serving.descendants()) == 1, "the early process runs")
        early = serving.descendants()
        os.kill(serving.process.pid, number)
        serving.process.wait(MAX_WAIT_SECONDS)
        until(lambda: not still_running(early), "the early process has ended")


def test_a_killed_rank_starts_again_in_a_new_process(tiny_model: Path) -> None:
    """A server of one rank runs it in the early process. After `kill -9` the rank has a new process and serves."""
    with Serving(str(tiny_model), "--no-ray", "--grpc-port", "0", "--kv-memory", "4MiB") as serving:
        serving.wait_ready()
        [first] = serving.group("group-0")["ranks"]
        assert command_line(first["pid"])[-1] == "early"
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: serving.group("group-0").get("restarts", 0) == 1, "the group is started again")
        until(lambda: serving.group("group-0").get("state") == "serving", "the group is back")
        [second] = serving.group("group-0")["ranks"]
        assert not lives(first["pid"]) and command_line(second["pid"])[-1] != "early"


def command_line(pid: int) -> list[str]:
    """The arguments of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
