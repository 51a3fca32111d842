"""A whole cluster as operators and clients see it: real Ray, real ranks over gloo, real gRPC, kill -9."""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from tests.cluster.running_server import COMMAND, coatcheck, until
from tests.cluster.serving import END_SECONDS, Serving, kill, lives

pytestmark = pytest.mark.ray

PROMPT = "def main() -> None: print('hello, world') and the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """The folder of the shared server's Ray. Its path is short because it contains sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def serving(tiny_model: Path, ray_folder: Path, shadowing_directory: Path) -> Iterator[Serving]:
    """Two groups of two ranks, shared by the tests of this file. The last test that uses it ends it."""
    flags = ["--groups", "2", "--tp", "2", "--grpc-port", "0", "--kv-memory", "8MiB", "--log-format", "json"]
    environment = {"RAY_TMPDIR": str(ray_folder)}
    with Serving(str(tiny_model.resolve()), *flags, environment=environment, directory=shadowing_directory) as serving:
        line = serving.wait_ready()
        assert "2 groups x tp 2" in line and "blocks of 16 tokens" in line
        yield serving


def wait_restarted(serving: Serving, before: dict[str, Any]) -> None:
    """Wait until the group whose former status is `before` serves with new ranks, and the former ones have ended."""
    name = before["name"]
    until(lambda: serving.group(name).get("restarts", 0) > before["restarts"], f"{name} is started again")
    until(lambda: serving.group(name).get("state") == "serving", f"{name} is back")
    until(lambda: not any(lives(rank["pid"]) for rank in before["ranks"]), f"the former ranks of {name} have ended")


def test_modules_of_the_current_directory_are_not_imported(serving: Serving) -> None:
    """In a directory whose files have the names of modules, serve has started with Ray, and it answers a request with a
    grammar, which a side process compiles."""
    assert serving.generate("a", max_tokens=4, structured=Grammar("regex", "[ab]+")).choices[0].token_ids


def test_one_request_is_followed_through_the_logs(serving: Serving) -> None:
    """With --log-format json every line that router and ranks write parses, and one request's id is in both."""
    address, name = serving.address, "followed-through"
    with grpc.insecure_channel(address) as channel:
        asked = GenerateRequest(text=PROMPT, request_id=name, sampling=SamplingParams(max_tokens=3, seed=1))
        GenerationStub(channel).Generate(asked, timeout=MAX_WAIT_SECONDS)
    said: dict[str, list[dict[str, Any]]] = {"RouterActor": [], "RankActor": []}

    def read() -> bool:
        for title, lines in said.items():
            lines.clear()
            pids = [pid for pid, command in serving.descendants().items() if command.startswith(f"ray::{title}")]
            for file in {os.path.realpath(f"/proc/{pid}/fd/2") for pid in pids}:
                # Ray marks its files with lines that begin with a colon, gRPC's core writes I, W or E and the date.
                text = [line for line in Path(file).read_text().splitlines() if not re.match(r":|[IWE]\d{4} ", line)]
                lines += map(json.loads, text)
        return all(any(line.get("request_id") == name for line in lines) for lines in said.values())

    until(read, f"the logs have {name}")
    ended = {title: [line for line in lines if line.get("request_id") == name] for title, lines in said.items()}
    (router,), (rank,) = ended["RouterActor"], ended["RankActor"]
    assert (router["outcome"], router["completion_tokens"], router["router"]) == ("ok", 3, "router-0")
    assert (rank["outcome"], rank["completion_tokens"], rank["rank"]) == ("ok", 3, f"{router['group']}/0")


def test_a_local_ray_runs_only_what_it_needs(serving: Serving) -> None:
    """Below `serve` runs none of Ray's processes that would only make the start longer."""
    commands = serving.descendants().values()
    assert any("/raylet" in command for command in commands)
    assert not [command for command in commands if "dashboard.py" in command or "monitor.py" in command]


def test_a_prompt_is_answered_and_its_prefix_reused(serving: Serving) -> None:
    """A prompt that extends an earlier one goes to the same group and finds its prefix cached."""
    first = serving.generate(PROMPT, max_tokens=8, temperature=0.0)
    assert len(first.token_ids) == 8 and first.usage.completion_tokens == 8
    after = serving.generate(PROMPT + first.text, max_tokens=8, temperature=0.0)
    assert after.group == first.group
    assert after.usage.cached_device_tokens >= 16


def test_a_plan_says_what_the_groups_report(serving: Serving, tiny_model: Path) -> None:
    """`coatcheck plan` computes from config.json the number of blocks and the KV dtype that the running groups
    report."""
    done = coatcheck("plan", str(tiny_model), "--tp", "2", "--kv-memory", "8MiB", "--json")
    planned, reported = json.loads(done.stdout), serving.status()
    assert [group["blocks_total"] for group in reported["groups"]] == [planned["num_blocks"]] * 2
    assert reported["model"]["kv_dtype"] == planned["kv_dtype"]
    assert reported["model"]["block_size"] == planned["block_size"]


def test_openai_clients_get_the_same_answer(serving: Serving) -> None:
    """OpenAI's client, at the address in the ready line, gets the text that gRPC gives, also streamed."""
    wanted = serving.generate(PROMPT, max_tokens=12, seed=11).text
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        asked: dict[str, Any] = dict(model=model, prompt=PROMPT, max_tokens=12, seed=11)
        assert client.completions.create(**asked).choices[0].text == wanted
        chunks = list(client.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


def test_status_shows_every_rank(serving: Serving) -> None:
    """`status` shows groups and ranks with their process ids, as tables and as JSON. A rank of a busy machine may be
    late, which `status` shows too, until it runs again."""
    for _ in range(2):
        serving.generate(PROMPT, max_tokens=1)
    status: dict[str, Any] = {}

    def all_serve() -> bool:
        status.update(json.loads(coatcheck("status", "--address", serving.address, "--json").stdout))
        groups = status["groups"]
        return all(group["state"] == "serving" for group in groups) and all(
            rank["healthy"] for group in groups for rank in group["ranks"]
        )

    until(all_serve, "every group serves and every rank is healthy", else_tell=lambda: status)
    assert status["state"] == "serving" and status["hit_ratio"] > 0
    assert [len(group["ranks"]) for group in status["groups"]] == [2, 2]
    for group in status["groups"]:
        assert group["blocks_total"] > 0
        assert all(lives(rank["pid"]) and rank["steps"] > 0 for rank in group["ranks"])
    table = coatcheck("status", "--address", serving.address).stdout
    assert "group-0/0" in table and "group-1/1" in table and "TTFT" in table


def test_a_killed_rank_costs_no_request(serving: Serving) -> None:
    """kill -9 of rank 0 amid a gRPC stream and an HTTP stream with a guided regex: both move and end with the tokens of
    an undisturbed run, the text matches the regex, and the group comes back."""
    request = GenerateRequest(text=PROMPT, sampling=SamplingParams(max_tokens=200, seed=5, ignore_eos=True))
    with (
        grpc.insecure_channel(serving.address) as channel,
        openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client,
    ):
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
        guided: dict[str, Any] = dict(
            model=client.models.list().data[0].id, prompt=PROMPT, max_tokens=200, seed=3, stream=True,
            extra_body={"guided_regex": "([a-z]{3}[0-9]{3}-){120}", "stop_token_ids": []},
        )  # fmt: skip
        undisturbed = stub.Generate(request, timeout=MAX_WAIT_SECONDS).choices[0].token_ids
        undisturbed_text = "".join(chunk.choices[0].text for chunk in client.completions.create(**guided))
        assert re.match(r"([a-z]{3}[0-9]{3}-)+", undisturbed_text)
        # On a busy machine the kill can come after the end of the gRPC stream. That run proves no failover.
        for _ in range(5):
            before = serving.group("group-0")
            coatcheck("drain", "group-1", "--address", serving.address)  # both streams begin on the other group
            chunks = iter(client.completions.create(**guided))
            texts = [next(chunks).choices[0].text]
            events = stub.GenerateStream(request, timeout=MAX_WAIT_SECONDS)
            assert next(events).started.group == "group-0"
            kill(before["ranks"][0]["pid"])
            coatcheck("drain", "group-1", "--undo", "--address", serving.address)
            texts += [chunk.choices[0].text for chunk in chunks]
            rest = list(events)
            wait_restarted(serving, before)
            assert [token for event in rest for token in event.delta.token_ids] == undisturbed
            assert "".join(texts) == undisturbed_text
            if rest[-1].final.moves:
                break
    assert rest[-1].final.moves == 1


def test_a_killed_supervisor_finds_everything_again(serving: Serving) -> None:
    """kill -9 of the supervisor disturbs nothing: the next one adopts the ranks that run and still restarts them."""
    before = {group["name"]: group for group in serving.status()["groups"]}
    old = serving.actor("Supervisor")
    kill(old)
    assert serving.generate(PROMPT, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    until(lambda: serving.actor("Supervisor") not in (0, old), "the supervisor is back")
    ranks = before["group-0"]["ranks"]
    assert serving.group("group-0")["ranks"][0]["pid"] == ranks[0]["pid"]
    kill(ranks[1]["pid"])
    wait_restarted(serving, before["group-0"])
    assert serving.group("group-1")["ranks"][0]["pid"] == before["group-1"]["ranks"][0]["pid"]


def test_restart_reaches_a_ray_that_serve_has_started(serving: Serving, ray_folder: Path, tmp_path: Path) -> None:
    """`coatcheck restart` of the same user on the same host finds the local Ray and its token. Other users cannot read
    the token, and without it the command says what is missing."""
    (token,) = (ray_folder / "ray").glob("*.token")
    assert token.stat().st_mode & 0o777 == 0o600
    address = f"127.0.0.1:{token.stem.rpartition('-')[2]}"
    flags = ["restart", "group-0", "--drain-seconds", "0"]
    stranger = coatcheck(*flags, "--ray-address", address, environment={"RAY_TMPDIR": str(tmp_path)})
    assert stranger.returncode == 1 and f"the Ray cluster at {address} wants its token" in stranger.stderr
    before = serving.group("group-0")
    done = coatcheck(*flags, environment={"RAY_TMPDIR": str(ray_folder)})
    assert done.returncode == 0 and done.stdout.startswith("group-0 serves again after "), done.stderr
    until(lambda: serving.group("group-0")["state"] == "serving", "its router knows")
    assert serving.group("group-0")["ranks"][0]["pid"] != before["ranks"][0]["pid"]


def test_a_killed_router_comes_back_at_its_address(serving: Serving) -> None:
    """kill -9 of the router: the next one listens at the same address and knows the groups."""
    kill(serving.actor("RouterActor"))
    until(lambda: serving.group("group-1").get("state") == "serving", "the router is back")
    assert serving.generate(PROMPT, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:
        assert client.models.list().data


def test_a_drained_group_gets_no_more_work(serving: Serving) -> None:
    """`coatcheck drain GROUP` returns once nothing runs there, and new requests go elsewhere."""
    done = coatcheck("drain", "group-0", "--address", serving.address)
    assert (done.returncode, done.stdout) == (0, "group-0 is drained\n")
    assert done.stderr == "group-0 takes no new work until `coatcheck drain group-0 --undo`\n"
    assert serving.group("group-0")["state"] == "drained"
    assert {serving.generate(PROMPT, max_tokens=2).group for _ in range(3)} == {"group-1"}
    missing = coatcheck("drain", "group-9", "--address", serving.address)
    assert missing.returncode == 2 and "group-9" in missing.stderr


def test_a_drain_is_undone(serving: Serving) -> None:
    """After `coatcheck drain --undo` a group, or the whole router, accepts requests again."""
    assert coatcheck("drain", "group-1", "--address", serving.address).returncode == 0
    assert coatcheck("drain", "group-1", "--undo", "--address", serving.address).returncode == 0
    assert serving.group("group-1")["state"] == "serving"
    assert coatcheck("drain", "--address", serving.address).returncode == 0
    assert serving.status()["state"] == "drained"
    done = coatcheck("drain", "--undo", "--address", serving.address)
    assert (done.returncode, done.stdout) == (0, "the router takes new work again\n")
    assert serving.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2


def test_sigterm_drains_and_leaves_nothing_behind(serving: Serving, ray_folder: Path) -> None:
    """On SIGTERM a line says that the server drains, the running stream completes, new requests are refused, then every
    process and the token file are gone, and the exit code is 0."""
    command = [
        *COMMAND,
        "generate",
        PROMPT,
        "--address",
        serving.address,
        "--max-tokens",
        "150",
        "--ignore-eos",
        "--n",  # enough choices that the request still runs during the commands below
        "16",
        "--json",
    ]
    serving.wait_idle()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        serving.wait_running()
        processes = serving.descendants()
        serving.process.send_signal(signal.SIGTERM)
        serving.wait_line("draining: running requests end first; send the signal again to stop at once")
        until(lambda: serving.status()["state"] == "draining", "it drains")
        refused = coatcheck("generate", PROMPT, "--address", serving.address, "--timeout", "1")
        assert refused.returncode != 0
        assert '"completion": 2400' in running.communicate(timeout=MAX_WAIT_SECONDS)[0]
    assert serving.process.wait(MAX_WAIT_SECONDS) == 0
    until(lambda: not any(lives(pid) for pid in processes), "every process is gone", END_SECONDS)
    assert not list((ray_folder / "ray").glob("*.token"))
