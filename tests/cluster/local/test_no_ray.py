"""`coatcheck serve --no-ray`, as operators and clients see it: real ranks, gRPC and HTTP, kill -9, Ctrl-C."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.local.local_cluster import LocalCluster
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import GroupStatus, StatusResponse
from tests.cluster.command_line import run_here
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import END_SECONDS, Serving, kill, lives, still_running

_FLAGS = ("--no-ray", "--grpc-port", "0", "--kv-memory", "4MiB")
PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def serving(tiny_model: Path) -> Iterator[Serving]:
    """One group of two ranks, shared by the tests of this file."""
    with Serving(str(tiny_model), *_FLAGS, "--tp", "2") as serving:
        assert "1 group x tp 2" in serving.wait_ready()
        yield serving


def ranks_of(serving: Serving) -> list[int]:
    """The process ids of the ranks."""
    return [rank["pid"] for rank in serving.group("group-0")["ranks"]]


def test_it_answers_without_ray(serving: Serving) -> None:
    """gRPC and HTTP answer, the ranks are children of the command, and no process of Ray runs below it."""
    assert serving.generate(PROMPT, max_tokens=4, seed=1).choices[0].text
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"{serving.url}/v1/models", timeout=MAX_WAIT_SECONDS) as answer:
        name = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{serving.url}/v1/completions",
        json.dumps({**json.loads(body), "model": name}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=MAX_WAIT_SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
    below = serving.descendants()
    assert set(ranks_of(serving)) <= below.keys()
    assert not [command for command in below.values() if "ray" in command.replace("--no-ray", "")]


def test_the_commands_work(serving: Serving) -> None:
    """status, explain, drain with its undo, and bench find the server as they find one on Ray."""
    address = ("--address", serving.address)
    status = run_here("status", "--json", *address)
    assert status.code == 0 and json.loads(status.out)["groups"][0]["state"] == "serving"
    assert run_here("explain", PROMPT, *address).code == 0
    drained = run_here("drain", *address)
    assert (drained.code, drained.out) == (0, "the router is drained\n")
    assert run_here("drain", "--undo", *address).code == 0
    measured = coatcheck("bench", *address, "--num-requests", "2", "--input-len", "8", "--output-len", "4")
    assert measured.returncode == 0, measured.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_a_lost_rank_is_started_again(serving: Serving, number: signal.Signals) -> None:
    """After the end of one rank, or if one does not answer, both are started again, and the command says so. The same
    request then has the same answer."""
    before, former = serving.generate(PROMPT, max_tokens=6, seed=3), ranks_of(serving)
    restarts = serving.group("group-0")["restarts"]
    os.kill(former[1], number)
    until(lambda: serving.group("group-0").get("restarts", 0) > restarts, "the group is started again")
    until(lambda: serving.group("group-0").get("state") == "serving", "the group is back")
    serving.wait_line("group-0 is serving again; last restart: ")  # fails if the line does not come
    until(lambda: not any(lives(pid) for pid in former), "the former ranks have ended")
    after = serving.generate(PROMPT, max_tokens=6, seed=3)
    assert after.choices[0].text == before.choices[0].text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_pauses_serves_on(serving: Serving, rank: int) -> None:
    """If a rank does not run for six seconds, as on a host that is swapped out, its group is not started again, and its
    stream continues there."""
    restarts, process = serving.group("group-0")["restarts"], ranks_of(serving)[rank]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(serving.generate, PROMPT, max_tokens=150, n=16, ignore_eos=True)
        serving.wait_running()
        os.kill(process, signal.SIGSTOP)
        time.sleep(6)
        os.kill(process, signal.SIGCONT)
        answer = running.result(MAX_WAIT_SECONDS)
    assert answer.usage.completion_tokens == 2400 and answer.moves == 0
    assert serving.group("group-0")["restarts"] == restarts and serving.group("group-0")["state"] == "serving"


def test_ctrl_c_lets_requests_end(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command with 0 after its `ready:` line. No process and no log folder is left."""
    with Serving(str(tiny_model), *_FLAGS, environment={"TMPDIR": str(tmp_path)}) as serving:
        serving.wait_ready()
        assert len(list(tmp_path.iterdir())) == 1
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 0
        assert serving.rest().startswith("draining: running requests end first")
    assert still_running(processes) == {} and list(tmp_path.iterdir()) == []


def test_sigterm_to_every_process_lets_requests_end(tiny_model: Path) -> None:
    """If all processes get SIGTERM, as systemd sends it to a service, the running request ends on its group with all
    tokens, one that a side process has checked, and the command ends with 0."""
    with Serving(str(tiny_model), *_FLAGS) as serving, ThreadPoolExecutor(1) as thread:
        serving.wait_ready()
        serving.generate(PROMPT, max_tokens=1, structured=Grammar("regex", "[ab]+"))
        running = thread.submit(serving.generate, PROMPT, max_tokens=150, n=16, ignore_eos=True)
        serving.wait_running()
        for pid in [*serving.descendants(), serving.process.pid]:
            os.kill(pid, signal.SIGTERM)
        answer = running.result(MAX_WAIT_SECONDS)
        assert answer.usage.completion_tokens == 2400 and answer.moves == 0
        assert serving.process.wait(MAX_WAIT_SECONDS) == 0


@pytest.mark.parametrize("stage", ["starting 1 group", "ready: "])
def test_nothing_outlives_a_killed_command(tiny_model: Path, stage: str) -> None:
    """kill -9 of the command leaves no process, also while the ranks are still starting."""
    with Serving(str(tiny_model), *_FLAGS) as serving:
        serving.wait_line(stage)
        until(lambda: bool(serving.descendants()), "the rank's process runs")
        processes = serving.descendants()
        kill(serving.process.pid)
        left = partial(still_running, processes)
        until(lambda: not left(), "every process is gone", END_SECONDS, else_tell=left)


def test_a_signal_ends_a_start(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C before anything serves ends the command with 130, and no process and no log folder is left."""
    with Serving(str(tiny_model), *_FLAGS, environment={"TMPDIR": str(tmp_path)}) as serving:
        serving.wait_line("starting 1 group of 1 rank on cpu, without Ray")
        until(lambda: bool(serving.descendants()), "the rank's process runs")
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 130, serving.rest()
        left = partial(still_running, processes)
        until(lambda: not left(), "every process is gone", END_SECONDS, else_tell=left)
    assert list(tmp_path.iterdir()) == []


def test_it_serves_when_nobody_reads_its_lines(tiny_model: Path) -> None:
    """After the reader of stderr has gone, a lost rank is started again, and Ctrl-C ends the command with 0."""
    with Serving(str(tiny_model), *_FLAGS) as serving:
        serving.wait_ready()
        lost = ranks_of(serving)[0]
        assert serving.process.stderr is not None
        serving.process.stderr.close()
        serving.process.stderr = None
        kill(lost)
        until(lambda: lost not in ranks_of(serving), "the rank has ended")
        until(lambda: serving.group("group-0").get("state") == "serving", "the group serves again")
        assert serving.generate(PROMPT, max_tokens=4).choices[0].token_ids
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 0


def test_what_a_rank_refuses_is_said_as_it_says_it(tiny_model: Path) -> None:
    """An error that only a rank can find ends the command with the rank's own message and exit code 1."""
    with Serving(str(tiny_model), "--no-ray", "--grpc-port", "0", "--kv-memory", "900TiB") as serving:
        *lines, last = serving.rest().splitlines()
        assert serving.process.wait(MAX_WAIT_SECONDS) == 1
    assert last.startswith("error: kv-memory asks for") and "lower kv-memory" in last
    assert not [line for line in lines if "Traceback" in line]


def test_a_taken_port_ends_the_start(tiny_model: Path) -> None:
    """If the router cannot listen, the command ends with one error line, and the ranks end with it."""
    flags = ("--no-ray", "--grpc-port", "0", "--kv-memory", "4MiB", "--grpc-host", "203.0.113.1", "--insecure")
    with Serving(str(tiny_model), *flags) as serving:
        last = serving.rest().splitlines()[-1]
        assert serving.process.wait(MAX_WAIT_SECONDS) == 2
    assert last.startswith("error: cannot listen on 203.0.113.1:0")


async def test_it_says_why_the_router_does_not_use_a_group(tmp_path: Path) -> None:
    """While a group serves that the router cannot reach, the command has the router's reason."""

    class OneGroup:
        """A router whose connection to its group fails."""

        async def status(self) -> StatusResponse:
            return StatusResponse(
                groups=[GroupStatus(name="group-0", state="connecting", reason="UNAVAILABLE: no way")]
            )

    cluster = LocalCluster(ServeConfig.build({"model": "m/m", "no_ray": True, "device": "cpu"}), tmp_path)
    assert await cluster.find_missing_connection() == ""
    cluster._router = OneGroup()  # type: ignore[assignment]  # of a router only `status` is called
    assert await cluster.find_missing_connection() == "the router does not use group-0: UNAVAILABLE: no way"
