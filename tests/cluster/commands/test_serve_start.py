"""`coatcheck serve` before it serves: invalid settings, a Ray that does not answer, and Ctrl-C at every stage."""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.grammar import Grammar
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import END_SECONDS, Serving, still_running


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/nowhere/model"], 2, "model directory /nowhere/model does not exist"),
        (["some/model", "--tp", "0"], 2, "tp is 0"),
        (["some/model", "--kv-memory", "lots"], 2, "kv-memory is 'lots'"),
        (["some/model", "--config", "/nowhere.yaml"], 2, "No such file"),
        (["some/model", "--tensor-parallel-size", "2"], 2, "here it is --tp"),
        ([], 2, "no model given"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(arguments: list[str], code: int, message: str) -> None:
    """An invalid setting ends the command with one line that says what to change."""
    done = coatcheck("serve", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith("error: ") and message in done.stderr


def test_a_taken_port_is_named(tiny_model: Path) -> None:
    """A port that is in use is refused with its number before Ray starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = coatcheck("serve", str(tiny_model), "--grpc-port", str(port))
    assert done.returncode == 2
    said = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --grpc-port"
    assert done.stderr == f"error: {said}\n"


def test_missing_gpus_are_refused(tiny_model: Path) -> None:
    """--device cuda without a GPU is refused before Ray starts."""
    done = coatcheck("serve", str(tiny_model), "--grpc-port", "0", "--device", "cuda", "--groups", "2", "--tp", "2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: device is cuda, and this machine has no GPU")


def test_modules_of_the_current_directory_are_not_imported(tiny_model: Path, shadowing_directory: Path) -> None:
    """In a directory whose files have the names of modules, serve starts without Ray and answers a request with a
    grammar, which a side process compiles. test_serve.py has it with Ray."""
    flags = ("--no-ray", "--grpc-port", "0", "--kv-memory", "4MiB")
    with Serving(str(tiny_model.resolve()), *flags, directory=shadowing_directory) as serving:
        serving.wait_ready()
        assert serving.generate("a", max_tokens=4, structured=Grammar("regex", "[ab]+")).choices[0].token_ids


@pytest.mark.ray
def test_what_a_rank_refuses_is_said_as_it_says_it(tiny_model: Path) -> None:
    """An error that only a rank can find ends the command with the rank's own message, after a line for each stage of
    the start."""
    with Serving(str(tiny_model), "--grpc-port", "0", "--kv-memory", "900TiB") as serving:
        *lines, last = serving.rest().splitlines()
        stages = [line for line in lines if not line.startswith("still starting Ray")]  # as a busy machine has it
        assert serving.process.wait(MAX_WAIT_SECONDS) == 1
    assert last.startswith("error: kv-memory asks for") and "are free; lower kv-memory" in last
    # A busy machine has lines between them which say that Ray takes its time.
    assert stages[0] == "starting Ray" and any(line.startswith("starting 1 group of 1 rank on ") for line in stages)


def test_a_cluster_that_has_ended_is_no_cluster(tmp_path: Path) -> None:
    """If `auto` names a cluster that has ended, the error says where the address comes from. Ray is not called."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")
    done = coatcheck("serve", "m/m", "--ray-address", "auto", environment={"RAY_TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no Ray cluster answers at 127.0.0.1:1, the last one started on this host" in done.stderr
    assert "ray start --head" in done.stderr


@pytest.mark.parametrize(
    ("address", "environment", "message"),
    [
        ("auto", {}, "s no Ray cluster"),
        ("auto", {"RAY_ADDRESS": "127.0.0.1:2"}, "answers at 127.0.0.1:2, which RAY_ADDRESS names"),
        ("ray://127.0.0.1:10001", {}, "has a scheme; write only HOST:PORT, such as 127.0.0.1:6379"),
        ("head", {}, "'head' is not HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster(tmp_path: Path, address: str, environment: dict[str, str], message: str) -> None:
    """Every address without a cluster gives one line that says what to write."""
    environment = {"RAY_TMPDIR": str(tmp_path), **environment}
    done = coatcheck("serve", "m/m", "--ray-address", address, environment=environment)
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and message in done.stderr


def test_what_listens_and_is_no_ray_is_refused() -> None:
    """A port where another program listens is refused at once; Ray would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = coatcheck("serve", "m/m", "--ray-address", address)
    assert done.returncode == 1 and f"{address}: something listens there, but does not speak gRPC" in done.stderr


@pytest.fixture
def no_ray() -> Iterator[str]:
    """A gRPC server that is not a Ray head."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_a_connection_that_hangs(no_ray: str, number: signal.Signals) -> None:
    """While Ray waits for a head that never answers, one signal ends the command at once."""
    with Serving("m/m", "--ray-address", no_ray) as serving:
        serving.wait_line("connecting to Ray at")
        os.killpg(serving.process.pid, number)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 130


def test_a_connection_that_hangs_ends_in_time(no_ray: str) -> None:
    """If a head never answers, the command ends after --ray-start-timeout with one line and exit code 1."""
    done = coatcheck("serve", "m/m", "--ray-address", no_ray, "--ray-start-timeout", "3")
    progress, last = done.stderr.splitlines()
    assert done.returncode == 1 and progress == f"connecting to Ray at {no_ray}"
    assert last.startswith(f"error: no Ray cluster answers at {no_ray} within 3 s: ")
    assert last.endswith("give another --ray-address, or give more time with --ray-start-timeout")


@pytest.mark.ray
@pytest.mark.parametrize(
    "stage", [pytest.param("starting Ray", marks=pytest.mark.full), "starting 1 group of 1 rank"]
)  # the next test is one of the first stage
def test_a_signal_ends_a_start_at_every_stage(tiny_model: Path, stage: str) -> None:
    """Ctrl-C before anything serves ends the command, and no process is left."""
    with Serving(str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB") as serving:
        serving.wait_line(stage)
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 130, serving.rest()
        assert "Traceback" not in serving.rest()
        left = partial(still_running, processes)
        until(lambda: not left(), "every process is gone", END_SECONDS, else_tell=left)


@pytest.mark.ray
def test_a_signal_leaves_nothing_of_a_ray_that_is_half_there(tiny_model: Path) -> None:
    """Ctrl-C also ends Ray's agents, which by themselves would try for a minute to reach the head that has ended."""
    with Serving(str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB") as serving:
        serving.wait_line("starting Ray")
        until(lambda: serving.actor("RuntimeEnvAgent") > 0, "Ray's agents run")
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 130, serving.rest()
        left = partial(still_running, processes)
        until(lambda: not left(), "every process is gone", END_SECONDS, else_tell=left)
