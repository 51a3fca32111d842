"""A cluster with TLS and keys: who is let in, who is not, and that no secret can be found."""

import http.client
import ipaddress
import json
import os
import re
import signal
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.ray_cluster.cluster_ca import sign_certificates
from coatcheck.proto.internal_tls import GROUP
from tests.cluster.running_server import COMMAND, coatcheck, until
from tests.cluster.serving import END_SECONDS, Serving, listening, lives
from tests.router.certificates import TestAuthority
from tests.router.http.browser import Browser
from tests.workers.rank_client import read_registration

pytestmark = pytest.mark.ray


@dataclass
class Secure:
    """A cluster that serves, and its credentials."""

    serving: Serving
    ca: Path
    key: str
    admin: str

    def run(self, *arguments: str, key: str = "", tls: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a client command with the key in its environment."""
        environment = {"COATCHECK_API_KEY": key, **({"COATCHECK_TLS_CA": str(self.ca)} if tls else {})}
        return coatcheck(*arguments, "--address", self.serving.address, environment=environment)


@pytest.fixture(scope="module")
def secure(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """A cluster of one rank."""
    folder = tmp_path_factory.mktemp("secure")
    authority = TestAuthority(folder)
    leaf, keys = authority.leaf("server"), folder / "keys.yaml"
    made = [coatcheck("keys", "new", *words, "--file", str(keys)) for words in (["search"], ["ops", "--role", "admin"])]
    key, admin = (done.stdout.strip() for done in made)
    assert len({key, admin}) == 2 and all(re.fullmatch(r"cc-[\w-]{43}", one) for one in (key, admin))
    assert key not in keys.read_text() and key not in made[0].stderr
    files = ["--tls-cert", str(leaf.cert), "--tls-key", str(leaf.key), "--api-keys", str(keys)]
    ports = ["--grpc-port", "0", "--http-port", "0"]
    with Serving(str(tiny_model), "--kv-memory", "4MiB", *ports, *files) as serving:
        serving.wait_ready()
        yield Secure(serving, authority.ca, key, admin)


def test_commands_come_in_with_a_key(secure: Secure) -> None:
    """A user's key may generate and not administrate; an admin's key may do both."""
    done = secure.run("generate", "def main", "--max-tokens", "3", "--json", key=secure.key)
    assert done.returncode == 0 and json.loads(done.stdout)["usage"]["completion"] == 3
    bench = secure.run(
        "bench", "--num-requests", "2", "--input-len", "4", "--output-len", "2", "--json", key=secure.key
    )
    assert bench.returncode == 0 and json.loads(bench.stdout)["succeeded"] == 2
    denied = secure.run("status", key=secure.key)
    assert denied.returncode == 1 and "has the role user; this needs the role monitor or admin" in denied.stderr
    assert secure.run("status", key=secure.admin).returncode == 0
    assert secure.run("explain", "def", key=secure.admin).returncode == 0


@pytest.mark.parametrize(
    ("key", "tls", "said"),
    [
        ("", True, "no API key was sent"),
        ("cc-wrong", True, "invalid API key"),
        ("not a key\n", True, "copy the key exactly"),
        ("", False, "closes the connection at once: if it speaks TLS, give its authority with --tls-ca"),
    ],
)
def test_commands_without_one_are_told(secure: Secure, key: str, tls: bool, said: str) -> None:
    """One line says which credential is missing, and never quotes a credential that was given."""
    done = secure.run("generate", "def main", key=key, tls=tls)
    assert done.returncode in (1, 2) and done.stderr.startswith("error: ") and said in done.stderr
    assert "cc-wrong" not in done.stderr


def test_http_speaks_tls(secure: Secure) -> None:
    """HTTP has the same certificate and the same keys as gRPC."""
    assert secure.serving.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(secure.ca))
    for key, status in ((secure.key, 200), ("cc-wrong", 401)):
        connection = http.client.HTTPSConnection(secure.serving.url.removeprefix("https://"), context=context)
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        assert connection.getresponse().status == status
        connection.close()


async def test_an_operator_watches(secure: Secure) -> None:
    """The dashboard and `top` show the cluster, through TLS, to an operator who has a key."""
    done = secure.run("top", "--once", "--json", key=secure.admin)
    assert done.returncode == 0 and json.loads(done.stdout)["groups"][0]["state"] == "serving"
    denied = secure.run("top", "--once", key=secure.key)
    assert denied.returncode == 1 and "this needs the role monitor or admin" in denied.stderr
    async with Browser("--ignore-certificate-errors") as browser:  # whose authority is this test's own
        await browser.open(secure.serving.url.replace("https://", f"https://me:{secure.admin}@"))
        await browser.see("document.querySelector('#state').textContent", "serving")
        await browser.see("document.querySelector('#cards .badge').textContent", "serving")


def test_nothing_of_it_listens_beyond_this_host(secure: Secure) -> None:
    """The router, the ranks and all processes of Ray listen on loopback only."""
    found = {ipaddress.ip_address(address) for address in listening(secure.serving.descendants())}
    plain = {getattr(address, "ipv4_mapped", None) or address for address in found}
    assert plain and all(address.is_loopback for address in plain), plain


def test_a_group_speaks_to_its_routers_alone(secure: Secure) -> None:
    """Rank 0's port refuses plain connections, TLS without a certificate, and a certificate of another authority."""
    status = secure.run("status", "--json", key=secure.admin)
    (group,) = json.loads(status.stdout)["groups"]
    stranger = sign_certificates().router
    assert stranger is not None
    options = [("grpc.ssl_target_name_override", GROUP)]
    tries = [
        grpc.insecure_channel(group["address"]),
        grpc.secure_channel(group["address"], grpc.ssl_channel_credentials(stranger.authority), options),
        grpc.secure_channel(
            group["address"],
            grpc.ssl_channel_credentials(stranger.authority, stranger.key, stranger.certificate),
            options,
        ),
    ]
    for channel in tries:
        with channel, pytest.raises(grpc.RpcError) as refused:
            read_registration(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def _token(secure: Secure) -> str:
    """Ray's token, from the environment of its processes."""
    environment = Path(f"/proc/{secure.serving.actor('RouterActor')}/environ").read_bytes().split(b"\0")
    return next(part for part in environment if part.startswith(b"RAY_AUTH_TOKEN=")).partition(b"=")[2].decode()


def test_ray_admits_nobody_without_its_token(secure: Secure) -> None:
    """Ray's head answers calls with its token only, not calls with none or another."""
    found = re.search(r"--gcs-address=(\S+)", " ".join(secure.serving.descendants().values()))
    assert found
    with grpc.insecure_channel(found[1]) as channel:
        ask = channel.unary_unary("/ray.rpc.ActorInfoGcsService/ListNamedActors")  # type: ignore[call-arg]
        whole = b"\x08\x01"  # of every namespace
        assert b"router-0" in ask(
            whole,
            timeout=MAX_WAIT_SECONDS,
            metadata=[("authorization", f"Bearer {_token(secure)}")],  # type: ignore[arg-type]
        )
        for metadata in (None, [("authorization", f"Bearer {'f' * 64}")]):
            with pytest.raises(grpc.RpcError) as refused:
                ask(whole, timeout=MAX_WAIT_SECONDS, metadata=metadata)  # type: ignore[arg-type]
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_no_secret_is_found_beside_the_cluster(secure: Secure) -> None:
    """No argument, log or status contains a key, Ray's token, or a private key."""
    mine = secure.serving.descendants()
    token = _token(secure)
    secure.run("generate", "def main", "--max-tokens", "2", key=secure.key)
    secure.run("status", key="cc-wrong-and-secret")
    secrets = [secure.key, secure.admin, "cc-wrong-and-secret", token, "PRIVATE KEY"]
    found = re.search(r"--session[-_]dir=(\S+)", " ".join(mine.values()))
    assert len(token) == 64 and found
    texts = {str(pid): command for pid, command in mine.items()}
    texts |= {
        str(path): path.read_text(errors="replace") for path in Path(found[1], "logs").rglob("*") if path.is_file()
    }
    texts["status"] = secure.run("status", "--json", key=secure.admin).stdout
    texts["said"] = "".join(secure.serving.lines)
    assert any("router" in name or "worker" in name for name in texts) and len(texts) > 10
    assert [(name, secret[:3]) for name, text in texts.items() for secret in secrets if secret in text] == []


def test_a_second_signal_stops_at_once(secure: Secure) -> None:
    """Ctrl-C twice while a stream runs: `serve` exits with 130 before the stream ends, and no process is left. This is
    the last test of the file because it ends the cluster."""
    serving = secure.serving
    endless = [*COMMAND, "generate", "def main", "--address", serving.address, "--max-tokens", "150", "--ignore-eos"]
    environment = {**os.environ, "COATCHECK_API_KEY": secure.key, "COATCHECK_TLS_CA": str(secure.ca)}

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(secure.run("status", "--json", key=secure.admin).stdout)
        return found

    with subprocess.Popen(
        [*endless, "--n", "64"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as running:
        until(lambda: status()["groups"][0]["running"] > 1, "the stream runs")
        processes = serving.descendants()
        os.killpg(serving.process.pid, signal.SIGINT)
        serving.wait_line("draining: running requests end first")
        os.killpg(serving.process.pid, signal.SIGINT)
        assert serving.process.wait(MAX_WAIT_SECONDS) == 130, serving.rest()
        running.kill()
    until(lambda: not any(lives(pid) for pid in processes), "every process is gone", END_SECONDS)
