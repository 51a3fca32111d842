"""The `coatcheck` command as a whole: its help, its errors, and hints for flags of other engines."""

import importlib.metadata
import re
import signal
import socket
import subprocess
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.config.address import split_address
from coatcheck.cluster.flag_hints import HINTS, find_hint
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig
from tests.cluster.command_line import command_of, flags_of, run_here
from tests.cluster.running_server import COMMAND, coatcheck


def test_version() -> None:
    """--version prints the installed version, and that is the package's own."""
    done = coatcheck("--version")
    assert (done.returncode, done.stdout) == (0, f"coatcheck {importlib.metadata.version('coatcheck')}\n")


def test_help_is_for_people() -> None:
    """Help shows arguments in capitals, flags without a type, and every command."""
    wide = {"COLUMNS": "120"}
    whole, one = (run_here(*words, "--help", environment=wide).out for words in ((), ("generate",)))
    assert "<bool>" not in whole + one and "{" not in one
    assert "generate [OPTIONS] PROMPT" in one
    assert all(f" {command} " in whole for command in ("serve", "generate", "status", "top", "drain", "bench", "plan"))


def test_help_is_in_parts() -> None:
    """The options of `serve` are grouped under headings, and examples end its help."""
    said = run_here("serve", "--help", environment={"COLUMNS": "120"}).out
    headings = re.findall(r"╭─ ([\w ]+) ─", said)
    assert headings == [
        "Arguments", "Options", "Model", "Groups", "Memory", "Limits", "Router", "Security", "Ray", "Logs and traces"
    ]  # fmt: skip
    assert "coatcheck serve demo/model --groups 2 --tp 2" in said.partition("Examples:")[2]


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--lora-modules", "a=x", "b=y", "--tp", "2"],
        ["--lora-modules", "a=x", "b=y", "m", "--tp", "2"],
        ["--tp", "2", "--lora-modules=a=x", "b=y", "m"],
        ["m", "--lora-modules", "a=x", "--tp", "2", "--lora-modules", "b=y"],
        ["--tp", "2", "--lora-modules", "a=x", "b=y", "--", "m"],
    ],
)
def test_a_flag_with_several_values(words: list[str]) -> None:
    """--lora-modules takes its values as vLLM does, one word each, or is repeated. MODEL may follow."""
    params = command_of("serve").make_context("serve", words).params
    assert (params["model"], params["lora_modules"], params["tp"]) == ("m", ["a=x", "b=y"], 2)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "m", "--tensor-parallel-size", "2"], "--tp"),
        (["serve", "m", "--mem-fraction-static=0.9"], "--gpu-memory-utilization"),
        (["serve", "m", "--port", "80"], "--grpc-port (gRPC) or --http-port"),
        (["serve", "--model", "m"], "coatcheck serve MODEL"),
        (["bench", "--num-prompts", "8"], "--num-requests"),
        (["status", "--host", "h"], "--address HOST:PORT"),
        (["serve", "m", "--enable-auto-tool-choice"], "has no --enable-auto-tool-choice; not needed: tool calls are"),
        (["serve", "m", "--speculative-config", "{}"], "no --speculative-config; here it is --speculative-tokens"),
        (["serve", "m", "--seed=1"], "has no --seed; not needed: each request has its field `seed`"),
        (["bench", "--dataset-name", "random"], "--prompts random"),
        (["serve", "m", "--tp", "2"], None),
        (["generate", "--model", "m", "p"], None),
        (["generate", "--", "--host"], None),
        ([], None),
    ],
)
def test_words_of_other_engines(arguments: list[str], hint: str | None) -> None:
    """A flag of another engine gives an error that names our flag. Our own flags give none."""
    found = find_hint(arguments)
    assert found is None if hint is None else found is not None and hint in found


def test_hints_are_for_flags_that_no_command_has() -> None:
    """No hint hides a flag of ours, and each flag that a hint says to write is one of the command."""
    for command, hints in HINTS.items():
        flags = flags_of(command)
        assert not hints.keys() & flags, command
        for hint in hints.values():
            assert set(re.findall(r"--[a-z][a-z-]*", hint)) <= flags, f"{command}: {hint}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "no such command 'nope'; see `coatcheck --help`"),
        (["generate"], "missing argument 'PROMPT'; see `coatcheck generate --help`"),
        (["serve", "m", "--nope"], "no such option: --nope"),
        (["serve", "m", "--max-num-seq", "8"], "no such option: --max-num-seq (Possible options: --max-num-seqs);"),
        (["serve", "m", "--trust-code"], "no such option: --trust-code; see"),
        (["serve", "m", "--insecur"], "no such option: --insecur; see"),
        (["serve", "m", "--groups", "x"], "invalid value for '--groups'"),
        (["generate", "x", "--system", "y"], "--system needs --chat; see `coatcheck generate --help`"),
        (["plan", "/nowhere"], "there is no /nowhere"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    """A usage error is one line that begins with `error: `, with exit code 2, whichever library finds it."""
    done = run_here(*arguments)
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert done.err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "no model given; pass MODEL or set it in --config"),
        (["serve", "m", "--port", "80"], "coatcheck serve has no --port"),
    ],
)
def test_a_mistake_of_serve_is_one_line(arguments: list[str], said: str) -> None:
    """The same holds for the process of `serve`, which handles signals, and for a flag of another engine."""
    done = coatcheck(*arguments)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "the hub gives no config.json for that id: ConnectError"),
        ("RepoNotFound", "no such model, or a private one that needs HF_TOKEN"),
        ("GatedRepo", "accept the model's terms on the hub and set HF_TOKEN"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str | None, said: str
) -> None:
    """If the hub cannot be reached, or refuses, the error says which of these it is and what to do."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, code)) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port if code else 1}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        done = run_here("plan", "some/model")
        hub.shutdown()
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert done.err.startswith("error: no directory some/model, and the hub gives") and said in done.err


def test_serve_refuses_a_model_that_the_hub_does_not_give_first(tmp_path: Path) -> None:
    """`serve` prints the error of `plan`, before Ray is started."""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_CACHE": str(tmp_path)}
    done = coatcheck("serve", "some/model", environment=environment)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith("error: no directory some/model, and the hub gives")


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses every request with its own error code."""

    def __init__(self, code: str | None, *handed: Any) -> None:
        self._code = code
        super().__init__(*handed)

    def do_GET(self) -> None:
        self.send_response(403 if self._code == "GatedRepo" else 404)
        self.send_header("X-Error-Code", self._code)  # type: ignore[arg-type]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_no_word_at_all_is_a_wish_for_help() -> None:
    """`coatcheck` alone lists the commands."""
    done = coatcheck()
    assert (done.returncode, done.stderr) == (0, "") and " serve " in done.stdout


@pytest.mark.parametrize("command", [["status"], ["drain"], ["bench"], ["explain", "x"]])
def test_an_address_is_host_and_port(command: list[str]) -> None:
    """Every command refuses an invalid address as a usage error."""
    done = run_here(*command, "--address", "http://127.0.0.1:1")
    assert done.code == 2 and "scheme" in done.err


def test_addresses() -> None:
    """Names, IPv4 and IPv6 in brackets have a host and a port."""
    for host in ("localhost", "10.0.0.1", "[::1]", "a-b.example"):
        assert split_address(f"{host}:50051") == (host, 50051)
    for wrong in ("", "host", ":1", "host:", "host:0", "host:65536", "::1:5", "a b:1"):
        with pytest.raises(InvalidConfig, match="HOST:PORT"):
            split_address(wrong)


def test_a_signal_leaves_no_traceback() -> None:
    """Ctrl-C while a command waits for an answer ends it without a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([*COMMAND, "generate", "x", "--address", address], stderr=subprocess.PIPE) as process:
            connection, _ = silent.accept()  # it is on its way
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=MAX_WAIT_SECONDS)
            connection.close()
    assert said == b"" and process.returncode == -signal.SIGINT


def test_singular_and_plural() -> None:
    """One is one."""
    assert [counted(number, "group") for number in (0, 1, 2, 1000)] == [
        "0 groups",
        "1 group",
        "2 groups",
        "1,000 groups",
    ]
