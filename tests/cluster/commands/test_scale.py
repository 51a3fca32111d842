"""`coatcheck scale` on a cluster that serves: groups are added and removed, and no stream is affected."""

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.ray_head import ENVIRONMENT, RayHead, ray_head
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving, kill
from tests.cluster.streaming_clients import STREAMS, StreamingClients


def test_nothing_to_scale_is_said_at_once() -> None:
    """Without a Ray at the address, and with zero groups, the command fails at once with one line."""
    done = coatcheck("scale", "--groups", "2", "--ray-address", "127.0.0.1:1")
    assert done.returncode == 1 and done.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:1")
    assert coatcheck("scale", "--groups", "0").returncode == 2


class Scaled:
    """A cluster of one-rank groups on a Ray of two logical CPUs, and `coatcheck scale` for it."""

    def __init__(self, head: RayHead, model: Path, groups: int, pool: ThreadPoolExecutor) -> None:
        self._head = head
        self._pool = pool
        self._serve = [str(model), "--groups", str(groups), "--grpc-port", "0", "--kv-memory", "4MiB"]

    def serving(self) -> Serving:
        """Runs `coatcheck serve`, to start the cluster or to join it."""
        return Serving(*self._serve, "--ray-address", self._head.address, environment=ENVIRONMENT)

    def scale(self, groups: int, *options: str) -> "Future[Any]":
        """Runs `coatcheck scale`."""
        asked = ["scale", "--groups", str(groups), "--ray-address", self._head.address, *options]
        return self._pool.submit(coatcheck, *asked, environment=ENVIRONMENT)


def require_done(scaling: "Future[Any]", streams: "list[Future[int]]") -> None:
    """Check that the command succeeded and that every stream beside it got the right tokens."""
    assert scaling.result().returncode == 0, scaling.result().stderr
    assert all(stream.result() for stream in streams)


@pytest.mark.ray
@pytest.mark.full
def test_scaling_outlives_what_happens_meanwhile(tiny_model: Path) -> None:
    """The supervisor is killed during a scaling and the command is run again; a group that is being removed is killed;
    two commands run at once, of which one waits. No stream is affected."""
    with ray_head(2) as head, ThreadPoolExecutor(STREAMS + 2) as pool:
        scaled = Scaled(head, tiny_model, 1, pool)
        with scaled.serving() as serving:
            serving.wait_ready()
            done = scaled.scale(2).result()
            assert done.returncode == 0, done.stderr
            pids = [serving.group(f"group-{number}")["ranks"][0]["pid"] for number in range(2)]
            supervisor = head.actor("Supervisor")
            kill(supervisor)
            until(lambda: head.actor("Supervisor") not in (0, supervisor), "the supervisor is back")
            kill(serving.process.pid)
            serving.process.wait()
        with scaled.serving() as serving:
            assert "2 groups x tp 1" in serving.wait_ready()
            assert any("this cluster has 2 groups, which stay" in line for line in serving.lines)
            clients = StreamingClients(serving.address, pool)

            # It is killed while what runs on it may still end; nobody waits for it then.
            scaling = scaled.scale(1, "--drain-seconds", "86400")
            streams = clients.ask_while(scaling)
            until(lambda: clients.states()["group-1"] == "draining", "group-1 takes no new work")
            kill(pids[1])
            require_done(scaling, streams)
            assert clients.states() == {"group-0": "serving"}

            # Its place is free again, and its name is taken anew; whichever command is first, the second follows it.
            both = [scaled.scale(groups, "--drain-seconds", "0") for groups in (2, 1)]
            streams = clients.ask_while(*both)
            for scaling in both:
                require_done(scaling, streams)
            states = clients.states()
            assert set(states.values()) == {"serving"} and len(states) in (1, 2)
            assert serving.group("group-0")["ranks"][0]["pid"] == pids[0]
            serving.process.send_signal(signal.SIGTERM)
            assert serving.process.wait(MAX_WAIT_SECONDS) == 0


@pytest.mark.ray
@pytest.mark.full
def test_a_drained_group_is_not_the_only_one_left(tiny_model: Path) -> None:
    """`scale` refuses to remove every group but a drained one. After the command that its message names, it removes
    them."""
    with ray_head(2) as head, ThreadPoolExecutor(1) as pool:
        scaled = Scaled(head, tiny_model, 2, pool)
        with scaled.serving() as serving:
            serving.wait_ready()
            assert coatcheck("drain", "group-0", "--address", serving.address).returncode == 0
            refused = scaled.scale(1).result()
            assert refused.returncode == 1 and "first run `coatcheck drain group-0 --undo`" in refused.stderr
            assert serving.generate("a", max_tokens=2).group == "group-1"
            assert coatcheck("drain", "group-0", "--undo", "--address", serving.address).returncode == 0
            done = scaled.scale(1).result()
            assert done.returncode == 0, done.stderr
            assert serving.generate("a", max_tokens=2).group == "group-0"
