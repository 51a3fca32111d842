"""`coatcheck serve --ray-address` on a Ray cluster that runs already: the command only watches the cluster."""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.ray_head import ENVIRONMENT, RayHead, ray_head
from tests.cluster.serving import Serving, coatcheck, kill, until

pytestmark = pytest.mark.ray


@pytest.fixture
def head() -> Iterator[RayHead]:
    """A Ray head with two logical CPUs."""
    with ray_head(2) as head:
        yield head


def test_a_cluster_outlives_its_command(head: RayHead, tiny_model: Path) -> None:
    """kill -9 of `serve` disturbs nothing; the same command finds the cluster again, ready once its router answers;
    other settings are refused."""
    arguments = [str(tiny_model), "--grpc-port", "0", "--kv-memory", "4MiB", "--ray-address", head.address]
    with Serving(*arguments, environment=ENVIRONMENT) as first:
        first.wait_ready()
        until(lambda: bool(first.group("group-0")["ranks"]), "the group has said who its ranks are")
        rank = first.group("group-0")["ranks"][0]["pid"]
        kill(first.process.pid)
        first.process.wait()
        assert first.generate("def main", "--max-tokens", "4")["usage"]["completion"] == 4
    with Serving(*arguments, "--max-num-seqs", "8", environment=ENVIRONMENT) as other:
        assert "already serves llama with other settings" in other.rest()
        assert other.process.wait() == 2
    router = head.actor("RouterActor")
    os.kill(router, signal.SIGSTOP)
    with Serving(*arguments, environment=ENVIRONMENT) as again:
        assert "router-0 does not answer" in again.wait_line("still waiting")
        os.kill(router, signal.SIGCONT)
        again.wait_ready()
        until(lambda: bool(again.group("group-0")["ranks"]), "the group has said who its ranks are")
        assert again.address == first.address and again.group("group-0")["ranks"][0]["pid"] == rank
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(MAX_WAIT_SECONDS) == 0
    assert coatcheck("status", "--address", first.address).returncode == 1
    # Its places are free again: what did not fit beside it fits now.
    with Serving(*arguments, "--tp", "2", environment=ENVIRONMENT) as next_one:
        assert "1 group x tp 2" in next_one.wait_ready()
        next_one.process.send_signal(signal.SIGTERM)
        assert next_one.process.wait(MAX_WAIT_SECONDS) == 0


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
