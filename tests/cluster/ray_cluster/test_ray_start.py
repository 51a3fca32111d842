"""A Ray that takes too long: `coatcheck serve` tries again, says how long it has taken, and gives up in one line."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.ray_log import find_session, last_error, last_line
from coatcheck.cluster.ray_cluster.ray_start import RayStart
from coatcheck.cluster.ray_cluster.raylet_suspender import RayletSuspender
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving
from tests.cluster.slow_ray import SlowRay, slow_ray

_RAYLET = """\
[2026-11-22 04:33:19,375 I 96 25] (raylet) agent_manager.cc:81: Monitor agent process with name runtime_env_agent
[2026-11-22 04:33:34,465 C 96 96] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. You have \
likely discovered a bug in Ray. Please report this issue at https://github.com/ray-project/ray/issues and we'll work \
with you to fix it. Check failed: it.has_value() Timed out waiting for file /tmp/ray/metrics_agent_port_ec91
*** StackTrace Information ***
/opt/ray/core/src/ray/raylet/raylet(+0xff770a) [0x55b5ff85370a] ray::operator<<()

"""


@pytest.fixture
def slow() -> Iterator[SlowRay]:
    with slow_ray() as slow:
        yield slow
        until(lambda: not slow.processes(), "every process of Ray is gone", 30, else_tell=slow.processes)


@pytest.mark.ray
@pytest.mark.full  # waits 20 s; the next test shows the waiting lines too
def test_a_slow_machine_is_waited_for(slow: SlowRay, tiny_model: Path) -> None:
    """Agents that need longer than a raylet waits for them do not make the attempt fail."""
    arguments = (str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB", "--ray-start-timeout", "500")
    with Serving(*arguments, environment=slow.environment) as serving:
        until(lambda: any("agent.py" in command for command in slow.processes().values()), "Ray is half there", 120)
        for _ in range(3):  # at least 20 s, of which the raylet by itself would wait for 15
            serving.wait_line("still starting Ray (")
        slow.mend_agents()
        serving.wait_ready()
        assert not any("trying again" in line for line in serving.lines)
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(60) == 0


@pytest.mark.ray
def test_another_attempt_may_succeed(slow: SlowRay, tiny_model: Path) -> None:
    """If Ray gives up once, all of its processes are killed, it is started again, and the cluster serves."""
    arguments = (str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB", "--ray-start-timeout", "500")
    with Serving(*arguments, environment=slow.environment) as serving:
        said = serving.wait_line("Ray did not start: ")
        assert "trying again (" in said and "of at most 500 s)" in said
        first = {pid for pid, command in slow.processes().items() if "agent" in command}
        until(lambda: not first & slow.processes().keys(), "the first attempt is gone", 60, else_tell=slow.processes)
        slow.mend_agents()
        serving.wait_ready()
        assert any(re.match(r"still starting Ray \(\d+ s of at most 500 s\)", line) for line in serving.lines)
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(60) == 0


@pytest.mark.ray
@pytest.mark.full  # waits 22 s
def test_the_start_timeout_ends_the_command(slow: SlowRay, tiny_model: Path) -> None:
    """After --ray-start-timeout the command ends with one line that quotes Ray's log, and no process is left."""
    arguments = ("serve", str(tiny_model), "--grpc-port", "0", "--ray-start-timeout", "22")
    done = coatcheck(*arguments, seconds=200, environment=slow.environment)
    *progress, last = done.stderr.splitlines()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.match(
        r"error: Ray did not start within 22 s: (raylet|gcs_server): .+; see /tmp/.+/logs, reduce the load", last
    )
    assert last.endswith("or give more time with --ray-start-timeout")
    assert progress[0] == "starting Ray" and [line[:18] for line in progress[1:3]] == ["still starting Ray"] * 2
    until(lambda: not slow.processes(), "every process of Ray is gone", 30, else_tell=slow.processes)


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_the_wait(slow: SlowRay, tiny_model: Path, number: signal.Signals) -> None:
    """Ctrl-C while Ray starts ends the command at once, with everything that the attempt has started."""
    with Serving(str(tiny_model), "--grpc-port", "0", environment=slow.environment) as serving:
        until(lambda: any("agent.py" in command for command in slow.processes().values()), "Ray is half there", 120)
        os.killpg(serving.process.pid, number)
        assert serving.process.wait(20) == 130
        assert "Traceback" not in serving.rest()
    until(lambda: not slow.processes(), "every process of Ray is gone", 30, else_tell=slow.processes)


def test_the_cause_is_found_in_the_log(tmp_path: Path) -> None:
    """The reason is the last error in Ray's logs, without Ray's request for a bug report and without a stack trace."""
    older, newer, other = (tmp_path / f"session_2026-11-22_04-33-{at}" for at in ("14_2_77", "48_5_77", "59_9_777"))
    for session in (older, newer, other):
        (session / "logs").mkdir(parents=True)
    assert find_session(tmp_path, 77) == newer and find_session(tmp_path, 7) is None
    assert last_error(newer) == last_line(newer) == ""
    (newer / "logs" / "gcs_server.out").write_text("[2026-11-22 04:33:10,1 I 9 9] (gcs_server) gcs.cc:1: GCS started\n")
    assert last_line(newer) == "gcs_server: GCS started" and last_error(newer) == ""
    (newer / "logs" / "raylet.err").write_text(_RAYLET)
    said = "raylet: Check failed: it.has_value() Timed out waiting for file /tmp/ray/metrics_agent_port_ec91"
    assert last_error(newer) == last_line(newer) == said


def test_a_log_that_others_put_there_is_not_read(tmp_path: Path) -> None:
    """A link in place of a log is not followed, and a FIFO does not block the command."""
    (logs := tmp_path / "logs").mkdir()
    (tmp_path / "secret").write_text(_RAYLET)
    (logs / "raylet.err").symlink_to(tmp_path / "secret")
    os.mkfifo(logs / "raylet.out")
    assert last_error(tmp_path) == last_line(tmp_path) == ""


class _LateSuspension(RayStart):
    """A start that succeeds while its other thread is about to suspend the raylet, here a `sleep`."""

    def __init__(self, raylet: int, session: Path) -> None:
        super().__init__(ServeConfig.build({"model": "m"}), Console(stderr=True))
        self.raylet, self.session = raylet, session
        self.is_suspending, self.has_suspended = threading.Event(), threading.Event()

    def _try_connect(self) -> bool:
        return self.is_suspending.wait(60)

    def _suspend_raylet_if_slow(self) -> None:
        self.is_suspending.set()
        self._finished.wait(60)
        time.sleep(0.2)  # the thread that has connected goes on meanwhile, if nothing holds it
        os.kill(self.raylet, signal.SIGSTOP)
        self._suspender = RayletSuspender(self.session)
        self._suspender._stopped = self.raylet
        self.has_suspended.set()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_a_start_leaves_no_raylet_suspended(tmp_path: Path) -> None:
    """A raylet that is suspended at the moment when the start succeeds is resumed."""
    with subprocess.Popen(["sleep", "600"]) as raylet:
        try:
            start = _LateSuspension(raylet.pid, tmp_path)
            start.wait_until_connected()
            assert start.has_suspended.wait(60)
            until(lambda: _state(raylet.pid) != "T", "the raylet is resumed", 30)
        finally:
            raylet.kill()
