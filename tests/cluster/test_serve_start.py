"""`coatcheck serve` before it serves: a Ray that is not there, and Ctrl-C at every stage."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.cluster.serving import Serving, coatcheck, lives, until

pytestmark = pytest.mark.ray


def test_a_cluster_that_has_ended_is_no_cluster(tmp_path: Path) -> None:
    """`auto` that names a cluster of yesterday is refused within seconds, with where the address comes from."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")
    began = time.monotonic()
    done = coatcheck("serve", "m/m", "--ray-address", "auto", environment={"RAY_TMPDIR": str(tmp_path)})
    assert time.monotonic() - began < 10
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no Ray cluster answers at 127.0.0.1:1, the last one started on this host" in done.stderr
    assert "ray start --head" in done.stderr


@pytest.mark.parametrize(
    ("address", "environment", "message"),
    [
        ("auto", {}, "finds no Ray cluster on this host"),
        ("auto", {"RAY_ADDRESS": "127.0.0.1:2"}, "answers at 127.0.0.1:2, which RAY_ADDRESS names"),
        ("ray://127.0.0.1:10001", {}, "has a scheme; write HOST:PORT alone, such as 127.0.0.1:6379"),
        ("head", {}, "'head' is not HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster(tmp_path: Path, address: str, environment: dict[str, str], message: str) -> None:
    """Every address that leads to no cluster is one line that says what to write."""
    environment = {"RAY_TMPDIR": str(tmp_path), **environment}
    done = coatcheck("serve", "m/m", "--ray-address", address, seconds=20, environment=environment)
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and message in done.stderr


def test_what_listens_and_is_no_ray_is_refused() -> None:
    """A port where something else listens is refused within seconds: Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = coatcheck("serve", "m/m", "--ray-address", address, seconds=20)
    assert done.returncode == 1 and f"{address}: something listens there, but does not speak gRPC" in done.stderr


@pytest.fixture
def no_ray() -> Iterator[str]:
    """A gRPC server that knows nothing of Ray."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_connection_that_hangs(no_ray: str, number: signal.Signals) -> None:
    """While Ray waits for a head that never answers, one signal ends the command at once."""
    with Serving("m/m", "--ray-address", no_ray) as serving:
        serving.wait_line("connecting to Ray at")
        os.killpg(serving.process.pid, number)
        assert serving.process.wait(5) == 130


@pytest.mark.parametrize("stage", ["starting Ray", "starting 1 group of 1 rank"])
def test_a_signal_ends_a_start_at_every_stage(tiny_model: Path, stage: str) -> None:
    """Ctrl-C before anything serves ends the command within seconds, and nothing stays behind."""
    with Serving(str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB") as serving:
        serving.wait_line(stage)
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(10) == 130, serving.rest()
        assert "Traceback" not in serving.rest()
        until(lambda: not any(lives(pid) for pid in processes), "every process is gone", 10)
