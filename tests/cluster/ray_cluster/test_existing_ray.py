"""`coatcheck serve --ray-address` on a Ray cluster that runs already: the command only watches the cluster."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.ray_head import ENVIRONMENT, RayHead, ray_head
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import Serving, kill
from tests.cluster.streaming_clients import STREAMS, StreamingClients

pytestmark = pytest.mark.ray


_FLAGS = ["--grpc-port", "0", "--kv-memory", "4MiB"]
# How long a command waits for a lost head. Ray's own default is a minute.
_RECONNECT_SECONDS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
_END_SECONDS = 45.0  # Ray itself would take 60 s to notice


class JoinedCluster:
    """A Ray head with two logical CPUs. `serving` is the newest `coatcheck serve` that has joined it."""

    def __init__(self, head: RayHead, model: Path, stack: ExitStack) -> None:
        self.head = head
        self._arguments = [str(model), *_FLAGS, "--ray-address", head.address]
        self._stack = stack
        self.serving = self.join()
        self.serving.wait_ready()

    def join(self, *more: str) -> Serving:
        """Start `coatcheck serve`."""
        environment = ENVIRONMENT | _RECONNECT_SECONDS
        self.serving = self._stack.enter_context(Serving(*self._arguments, *more, environment=environment))
        return self.serving

    def rank_pid(self) -> int:
        """The process id of group-0's rank."""
        until(lambda: bool(self.serving.group("group-0")["ranks"]), "the group has reported its ranks")
        return int(self.serving.group("group-0")["ranks"][0]["pid"])

    def scale(self, groups: int, *options: str) -> subprocess.CompletedProcess[str]:
        """Run `coatcheck scale`."""
        flags = ["--groups", str(groups), "--ray-address", self.head.address]
        return coatcheck("scale", *flags, *options, environment=ENVIRONMENT)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[JoinedCluster]:
    """One group, on a Ray that adds 1 to its niceness. The tests of this file run in order, and the last one ends the
    cluster."""
    with ray_head(2, ENVIRONMENT | {"RAY_worker_niceness": "1"}) as head, ExitStack() as stack:
        yield JoinedCluster(head, tiny_model, stack)


def test_the_niceness_of_ranks_is_told(cluster: JoinedCluster) -> None:
    """`serve` warns once before its `ready:` line that Ray has started the rank at a niceness above 0."""
    warnings = [line for line in cluster.serving.lines if line.startswith("warning:")]
    assert len(warnings) == 1, cluster.serving.lines
    assert f"nice {min(os.nice(0) + 1, 19)}," in warnings[0] and "RAY_worker_niceness=0" in warnings[0]


def test_a_router_returns_at_its_port_under_another_supervisor(cluster: JoinedCluster) -> None:
    """A router that is killed together with the supervisor answers again at the same ports, which the system chose.
    The loss of the router alone is said, and that it serves again."""
    supervisor, router = cluster.head.actor("Supervisor"), cluster.head.actor("RouterActor")
    kill(supervisor)
    kill(router)
    until(lambda: cluster.head.actor("RouterActor") not in (0, router), "the router has another process")
    until(lambda: cluster.serving.group("group-0").get("state") == "serving", "the router answers at its port")
    with urllib.request.urlopen(f"{cluster.serving.url}/health", timeout=MAX_WAIT_SECONDS) as answer:
        assert answer.status == 200
    kill(cluster.head.actor("RouterActor"))
    assert cluster.serving.wait_line("router-0 is lost") == "router-0 is lost: its process died\n"
    again = cluster.serving.wait_line("router-0 is serving again")
    assert again == "router-0 is serving again; last restart: its process died\n"
    until(lambda: cluster.serving.group("group-0").get("state") == "serving", "the router has its group")


def test_a_cluster_outlives_its_command(cluster: JoinedCluster) -> None:
    """kill -9 of `serve` disturbs nothing; the same command finds the cluster again, ready once its router answers;
    other settings are refused."""
    first, rank = cluster.serving, cluster.rank_pid()
    kill(first.process.pid)
    first.process.wait()
    assert first.generate("def main", max_tokens=4).usage.completion_tokens == 4
    other = cluster.join("--max-num-seqs", "8")
    assert "already serves llama with other settings" in other.rest()
    assert other.process.wait() == 2
    router = cluster.head.actor("RouterActor")
    os.kill(router, signal.SIGSTOP)
    again = cluster.join()
    assert "router-0 does not answer" in again.wait_line("still waiting")
    os.kill(router, signal.SIGCONT)
    again.wait_ready()
    assert again.address == first.address and cluster.rank_pid() == rank


def test_groups_come_and_go_under_streams(cluster: JoinedCluster) -> None:
    """`coatcheck scale` from one group to two and back while streams run: all streams end as they would have
    undisturbed. More groups than fit are refused with what is missing, and nothing changes."""
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        clients = StreamingClients(cluster.serving.address, pool)

        def scale_under_streams(groups: int) -> None:
            scaling = pool.submit(cluster.scale, groups, "--drain-seconds", "0")
            streams = clients.ask_while(scaling)
            assert scaling.result().returncode == 0, scaling.result().stderr
            assert all(stream.result() for stream in streams)

        scale_under_streams(2)
        assert clients.states() == {"group-0": "serving", "group-1": "serving"}
        refused = cluster.scale(4)
        assert refused.returncode == 2
        assert "2 groups with tp 1 need 2 CPUs, and this Ray cluster has 0 free on 1 node" in refused.stderr
        assert set(clients.states()) == {"group-0", "group-1"}
        scale_under_streams(1)
        assert clients.states() == {"group-0": "serving"}


def test_sigterm_ends_the_cluster_and_frees_its_places(cluster: JoinedCluster) -> None:
    """On SIGTERM `serve` ends router and groups. What did not fit beside them then fits."""
    ended = cluster.serving
    ended.process.send_signal(signal.SIGTERM)
    assert ended.process.wait(MAX_WAIT_SECONDS) == 0
    assert coatcheck("status", "--address", ended.address).returncode == 1
    assert "1 group x tp 2" in cluster.join("--tp", "2").wait_ready()


def test_a_lost_head_is_waited_for(cluster: JoinedCluster) -> None:
    """kill -9 of the head's GCS: `serve` says that it waits, and exits with 1 and one error line once the head has been
    gone for as long as Ray's setting says."""
    kill(cluster.head.program("gcs_server"))
    cluster.serving.wait_line(f"warning: Ray's head at {cluster.head.address} is gone")
    until(lambda: cluster.serving.process.poll() is not None, "serve ends", _END_SECONDS)
    lines = [line for line in cluster.serving.rest().splitlines() if not line.startswith("group-0 is lost")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: Ray's head (its GCS) at {cluster.head.address} has been gone")
    assert cluster.serving.process.returncode == 1


def test_the_users_token_is_shown_to_a_ray_of_this_host(tmp_path: Path) -> None:
    """A Ray that `ray start` has started asks for the token in ~/.ray/auth_token, if there is one. With `--ray-address
    auto` the command sends it, as Ray's own client does; with an address it says which variables to set."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, for the sake of Ray's sockets
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    environment = ENVIRONMENT | {"HOME": str(tmp_path), "RAY_TMPDIR": str(folder)}
    with_mode = environment | {"RAY_AUTH_MODE": "token"}
    del environment["RAY_AUTH_MODE"]
    try:
        with ray_head(1, environment) as head:
            restart = ("restart", "--ray-address")
            found = coatcheck(*restart, "auto", environment=environment)
            assert found.returncode == 1 and "error: nothing serves on the Ray cluster" in found.stderr
            named = coatcheck(*restart, head.address, environment=environment)
            assert named.returncode == 1 and "wants its token: set RAY_AUTH_MODE=token, and " in named.stderr
            shown = coatcheck(*restart, head.address, environment=with_mode)
            assert shown.returncode == 1 and "error: nothing serves on the Ray cluster" in shown.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_no_cluster_at_the_address_is_said_at_once() -> None:
    """If no Ray answers at the address, the command prints one line and exits with 1."""
    done = coatcheck("serve", "some/model", "--ray-address", "127.0.0.1:1")
    assert done.returncode == 1 and done.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:1")
