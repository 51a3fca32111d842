"""`coatcheck serve` when its Ray is lost: one error line, a timely end, and no process left."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_head import ENVIRONMENT, ray_head
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving, kill, still_running

pytestmark = pytest.mark.ray

# Ray itself would take 60 s to notice either.
_SECONDS = 45.0
_FLAGS = ["--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Ray's folder. Its path is short because it contains sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def serving(folder: Path, tiny_model: Path) -> Iterator[Serving]:
    """`coatcheck serve` with a local Ray."""
    with Serving(str(tiny_model), *_FLAGS, environment={"RAY_TMPDIR": str(folder)}) as serving:
        serving.wait_ready()
        yield serving


def process_of(serving: Serving, program: str) -> int:
    """The process id of one of Ray's own programs below `serve`."""
    return next(
        pid for pid, command in serving.descendants().items() if os.path.basename(command.partition(" ")[0]) == program
    )


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("gcs_server", "Ray's head (its GCS, process "),
        # The test below kills the raylet too.
        pytest.param("raylet", "Ray's node manager (its raylet, process ", marks=pytest.mark.full),
    ],
)
def test_a_ray_of_our_own_that_is_lost_ends_serve(serving: Serving, folder: Path, program: str, said: str) -> None:
    """kill -9 of the GCS or the raylet: `serve` prints one line and exits with 1, long before Ray would have noticed.
    Every process and the token file are gone."""
    processes = serving.descendants()
    kill(process_of(serving, program))
    until(lambda: serving.process.poll() is not None, "serve ends", _SECONDS)
    lines = serving.rest().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {said}") and "start the same command again" in lines[0]
    assert serving.process.returncode == 1
    until(lambda: not still_running(processes), "every process is gone", else_tell=lambda: still_running(processes))
    assert not list((folder / "ray").glob("*.token"))


@pytest.mark.full  # starts a cluster for one rare order of events
def test_a_signal_ends_serve_also_without_a_raylet(serving: Serving) -> None:
    """If SIGINT arrives together with the raylet's end, the command does not wait for a drain that cannot finish."""
    processes = serving.descendants()
    os.kill(serving.process.pid, signal.SIGSTOP)
    kill(process_of(serving, "raylet"))
    os.kill(serving.process.pid, signal.SIGINT)
    os.kill(serving.process.pid, signal.SIGCONT)
    until(lambda: serving.process.poll() is not None, "serve ends", _SECONDS)
    assert serving.process.returncode == 1 and "error: Ray's node manager" in serving.rest()
    until(lambda: not still_running(processes), "every process is gone", else_tell=lambda: still_running(processes))


@pytest.mark.full  # test_existing_ray.py shows the wait, to its end in time
def test_a_signal_ends_the_wait_for_a_head(tiny_model: Path) -> None:
    """While `serve` waits for the head of a cluster that was there, a signal ends the command at once."""
    with ray_head(2) as head:
        environment = {**ENVIRONMENT, "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
        with Serving(str(tiny_model), *_FLAGS, "--ray-address", head.address, environment=environment) as serving:
            serving.wait_ready()
            kill(head.program("gcs_server"))
            serving.wait_line(f"warning: Ray's head at {head.address} is gone")
            serving.process.send_signal(signal.SIGINT)
            assert serving.process.wait(_SECONDS) == 1
            lines = [line for line in serving.rest().splitlines() if not line.startswith("group-0 is lost")]
            assert len(lines) == 1
            assert lines[0].startswith(f"error: Ray's head (its GCS) at {head.address} has been gone")


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.full  # waits for a start that fails
def test_a_full_disk_is_told(small_disk: Path, tiny_model: Path) -> None:
    """If a rank cannot be restarted because Ray's disk is full, `serve` and `status` say so. Once there is room, its
    group serves again by itself."""
    with Serving(str(tiny_model), *_FLAGS, environment={"RAY_TMPDIR": str(small_disk)}) as serving:
        serving.wait_ready()
        rank = serving.group("group-0")["ranks"][0]["pid"]
        with pytest.raises(OSError, match="No space left"), (small_disk / "much").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        kill(rank)
        said = f"; the disk under {small_disk / 'ray'} on "
        line = serving.wait_line("group-0 is lost: rank 0 has ended: its process died")
        assert said in line and " is full (" in line and "make room" in line
        until(lambda: serving.group("group-0").get("restarts", 0) > 1, "a start has failed", 120.0)
        assert said in coatcheck("status", "--address", serving.address).stdout
        (small_disk / "much").unlink()
        serving.wait_line("group-0 is serving")
        assert any(line.startswith(f"warning: the disk under {small_disk / 'ray'} on ") for line in serving.lines)
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait() == 0
