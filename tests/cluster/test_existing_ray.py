"""`coatcheck serve --ray-address`: on a Ray that was there before, the command only watches."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.serving import Serving, coatcheck, kill, until

_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def ray_address() -> Iterator[str]:
    """A Ray head with two CPUs, in processes of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    command = [str(Path(sys.executable).parent / "ray"), "start", *options]
    head = subprocess.Popen(
        command,
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until(lambda: _listens(port), "the Ray head listens")
    yield f"127.0.0.1:{port}"
    # Its processes share its group, and what they have started ends with them; `ray stop` would end every Ray here.
    os.killpg(head.pid, signal.SIGKILL)
    head.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(300)  # four starts, on a machine that may be busy
def test_a_cluster_outlives_its_command(ray_address: str, tiny_model: Path) -> None:
    """kill -9 of `serve` disturbs nothing; the same command finds the cluster again, and other settings are refused."""
    arguments = [str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB", "--ray-address", ray_address]
    with Serving(*arguments, environment=_ENVIRONMENT) as first:
        first.wait_ready()
        rank = first.group("group-0")["ranks"][0]["pid"]
        kill(first.process.pid)
        first.process.wait()
        assert first.generate("def main", "--max-tokens", "4")["usage"]["completion"] == 4
    with Serving(*arguments, "--groups", "2", environment=_ENVIRONMENT) as other:
        assert "already serves llama with other settings" in other.rest()
        assert other.process.wait() == 1
    with Serving(*arguments, environment=_ENVIRONMENT) as again:
        again.wait_ready()
        assert again.address == first.address and again.group("group-0")["ranks"][0]["pid"] == rank
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(30) == 0
    assert coatcheck("status", "--address", first.address).returncode == 1
    # Its places are free again: what did not fit beside it fits now.
    with Serving(*arguments, "--tp", "2", environment=_ENVIRONMENT) as next_one:
        assert "1 group x tp 2" in next_one.wait_ready()
        next_one.process.send_signal(signal.SIGTERM)
        assert next_one.process.wait(30) == 0


def test_no_cluster_at_the_address_is_said_at_once() -> None:
    """An address where no Ray answers is one line and exit 1, within seconds."""
    done = coatcheck("serve", "some/model", "--ray-address", "127.0.0.1:1", seconds=30)
    assert done.returncode == 1 and done.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:1")
