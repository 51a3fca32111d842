"""Exit codes: 2 if the user must change the command, 1 for anything else, with one line on stderr."""

import asyncio
import gzip
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from coatcheck.cluster.cli import COMMANDS
from coatcheck.cluster.client import credentials
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from tests.cluster.command_line import run_here
from tests.cluster.fake_router import FakeRouter
from tests.cluster.running_server import COMMAND

NOBODY = "127.0.0.1:1"
ASKS_A_ROUTER = ("generate", "status", "drain", "top", "explain", "bench")
PROMPT = {"generate": ["x"], "explain": ["x"]}
MODEL = str(Path(__file__).parents[3] / "demo" / "model")


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a command that prints nothing to stdout."""
    done = run_here(*arguments)
    assert done.out == ""
    return done.code, done.err


def assert_one_line(said: tuple[int, str], code: int, message: str) -> None:
    assert said[0] == code, said[1]
    assert said[1].startswith("error: ") and said[1].count("\n") == 1 and message in said[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_2(command: str) -> None:
    """Every command refuses a flag that it does not have."""
    assert_one_line(run(command, "--nope"), 2, "no such option: --nope")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0; it must be in [0, 100]"),
        (["generate", "x", "--n", "0"], "n is 0"),
        (["generate", "x", "--seed", "-1"], "seed is -1"),
        (["generate", "x", "--timeout", "0"], "--timeout"),
        (["generate", "x", "--timeout", "inf"], "--timeout"),
        (["generate", "x", "--retain", "101"], "retention.priority is 101; use 0 to 100"),
        (["generate", "\udcff"], "is not valid UTF-8"),
        (["generate", "x", "--tls-ca", "/nowhere.pem"], "/nowhere.pem: No such file or directory"),
        (["status", "--tls-ca", f"{MODEL}/config.json"], "config.json holds no certificate in PEM"),
        (["drain", "group-0", "--timeout", "-1"], "'--timeout': '-1' should be greater than or equal to 0"),
        (["drain", "group-0", "--timeout", "nan"], "'--timeout': nan is not a number"),
        (["top", "--every", "0"], "--every"),
        (["explain", "x", "--max-tokens", "-1"], "max_tokens is -1; it must be at least 1"),
        (["explain", "x", "--max-tokens", "4294967296"], "max_tokens is 4294967296, which its field cannot hold"),
        (["bench", "--concurrency", "0"], "--concurrency"),
        (["bench", "--output-len", "99999999999"], "--output-len"),
        (["bench", "--trace", "/nowhere.csv"], "cannot read the trace /nowhere.csv: No such file or directory"),
        (["bench", "--plot", "/nowhere/run.png"], "cannot be written"),
        (["plan", "/nowhere"], "there is no /nowhere"),
        (["plan", MODEL, "--tp", "3"], "tp 3 does not divide the attention heads (4)"),
        (["plan", MODEL, "--lengths", "/nowhere.csv"], "cannot read the trace /nowhere.csv"),
        (["keys", "new", "me", "--role", "king"], "role is 'king'"),
        (["keys", "new", "me", "--file", "/nowhere/keys.yaml"], "/nowhere/keys.yaml: No such file or directory"),
        (["restart", "--ray-address", "head"], "'head' is not HOST:PORT"),
        (["scale", "--groups", "0"], "--groups"),
        (["serve", MODEL, "--groups", "0"], "groups is 0"),
        (["serve", MODEL, "--config", "/nowhere.yaml"], "/nowhere.yaml: No such file or directory"),
        (["serve", MODEL, "--grpc-host", "0.0.0.0"], "--insecure"),
    ],
)
def test_a_wrong_value_is_2(arguments: list[str], message: str) -> None:
    """An invalid value or a missing file is found before any server is called."""
    where = ["--address", NOBODY] if arguments[0] in ASKS_A_ROUTER else []
    assert_one_line(run(*arguments, *where), 2, message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace.csv", b"\xff\xfe", "can't decode byte 0xff"),
        ("trace.jsonl", b"{}", "line 1 of the trace is not a Mooncake request"),
        ("trace.csv.gz", gzip.compress(b"TIMESTAMP,ContextTokens\n" * 99)[:20], "ended before the end-of-stream"),
        ("trace.txt", b"", "is neither .jsonl (Mooncake) nor .csv (Azure)"),
    ],
    ids=["csv", "jsonl", "gz", "txt"],
)
@pytest.mark.parametrize("command", [["plan", MODEL, "--lengths"], ["bench", "--address", NOBODY, "--trace"]])
def test_a_damaged_trace_is_2(tmp_path: Path, command: list[str], name: str, content: bytes, message: str) -> None:
    """The error names the trace that cannot be read, in `plan` and in `bench`, which calls no server before."""
    (tmp_path / name).write_bytes(content)
    assert_one_line(run(*command, str(tmp_path / name)), 2, message)


@pytest.mark.parametrize("command", ASKS_A_ROUTER)
def test_no_server_is_1(command: str) -> None:
    """Every command has the same error if no server answers. The same command may succeed later."""
    said = run(command, *PROMPT.get(command, []), "--address", NOBODY)
    assert_one_line(said, 1, f"error: no server answers at {NOBODY}; is `coatcheck serve` running there?")


@pytest.mark.parametrize("command", ASKS_A_ROUTER)
def test_a_router_that_answers_nothing_is_1(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Every command gives up a router that is suspended, as soon as the limit for connecting has passed."""
    monkeypatch.setattr(credentials, "CONNECT_SECONDS", 0.5)
    # Imports what the command needs, which takes many seconds on a busy machine.
    run(command, *PROMPT.get(command, []), "--address", NOBODY)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        said = run(command, *PROMPT.get(command, []), "--address", address)
        assert_one_line(said, 1, f"{address} accepts the connection but does not answer")
    assert time.monotonic() - began < 18  # gRPC itself would try for 20 s


@pytest.mark.parametrize("arguments", [["restart"], ["scale", "--groups", "2"], ["serve", MODEL]])
def test_no_ray_is_1(arguments: list[str]) -> None:
    """No Ray cluster answers: the same command may succeed later."""
    assert_one_line(run(*arguments, "--ray-address", NOBODY), 1, f"no Ray cluster answers at {NOBODY}")


REFUSALS = [
    (grpc.StatusCode.INVALID_ARGUMENT, 2),
    (grpc.StatusCode.NOT_FOUND, 2),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
    (grpc.StatusCode.UNAUTHENTICATED, 1),
    (grpc.StatusCode.PERMISSION_DENIED, 1),
    (grpc.StatusCode.UNAVAILABLE, 1),
    (grpc.StatusCode.INTERNAL, 1),
]


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with FakeRouter() as router:
        yield router


@pytest.mark.parametrize(("status", "code"), REFUSALS, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize("command", [["generate", "x"], ["bench"]], ids=lambda words: words[0])
async def test_what_a_server_refuses(
    router: FakeRouter, command: list[str], status: grpc.StatusCode, code: int
) -> None:
    """2 if the request is wrong or names a missing model, 1 if the same request may succeed later."""
    router.refusal = (status, "this is why")
    said = await asyncio.to_thread(run, *command, "--address", router.address)
    assert_one_line(said, code, "this is why")


class Refusing(AdminServicer):
    """Refuses every call with `status`."""

    status = grpc.StatusCode.NOT_FOUND

    def _refuse(self, request: object, context: grpc.ServicerContext) -> pb.StatusResponse:
        context.abort(self.status, "this is why")

    Status = Drain = Explain = _refuse


@pytest.mark.parametrize(("status", "code"), REFUSALS, ids=lambda value: getattr(value, "name", None))
def test_what_a_server_refuses_of_status_drain_top_and_explain(status: grpc.StatusCode, code: int) -> None:
    """The other commands that call a router have the same exit codes."""
    service, server = Refusing(), grpc.server(futures.ThreadPoolExecutor(1))
    service.status = status
    add_AdminServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    for command in ("status", "drain", "top", "explain"):
        assert_one_line(run(command, *PROMPT.get(command, []), "--address", address), code, "this is why")
    server.stop(None).wait()


def test_input_that_is_not_utf8_is_2() -> None:
    """A prompt from standard input must be UTF-8."""
    done = subprocess.run([*COMMAND, "generate", "-", "--address", NOBODY], input=b"def \xff", capture_output=True)
    assert_one_line((done.returncode, done.stderr.decode()), 2, "is not valid UTF-8")


@pytest.mark.parametrize(
    "arguments", [["plan", MODEL], pytest.param(["plan", MODEL, "--json"], marks=pytest.mark.full), ["--version"]]
)
def test_a_full_disk_is_1(arguments: list[str]) -> None:
    """Output that cannot be written is one line, not a traceback, whether Python buffers it or not."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert_one_line((done.returncode, done.stderr), 1, "No space left on device")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_changes_nothing(closed: str) -> None:
    """A command whose input, output or error stream is closed succeeds, and prints to the others as usual."""
    command = f"exec {shlex.join([*COMMAND, 'plan', MODEL])} {closed}"
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and bool(done.stdout) == (closed != ">&-")


@pytest.mark.parametrize(("closed", "name"), [("<&-", "stdin"), (">&-", "stdout"), ("2>&-", "stderr")])
def test_child_processes_inherit_a_stream_that_was_closed(closed: str, name: str) -> None:
    """The stream is open in a child process too: no file that the child opens gets its file descriptor."""
    child = f"import sys; raise SystemExit(sys.{name} is None)"
    code = (
        "import subprocess, sys; from coatcheck.cluster.cli import _open_closed_streams; _open_closed_streams(); "
        f"raise SystemExit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    command = f"exec {shlex.join([sys.executable, '-c', code])} {closed}"
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_leaves_is_1_and_silent() -> None:
    """`coatcheck plan ... | head -1` prints no error."""
    with subprocess.Popen([*COMMAND, "plan", MODEL, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.close()
        assert (left.stderr.read(), left.wait()) == (b"", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_top_ends_with_0(number: signal.Signals) -> None:
    """Ctrl-C is the normal end of `top`, also when it writes JSON."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_AdminServicer_to_server(Idle(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    command = [*COMMAND, "top", "--json", "--address", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
        assert top.stdout is not None and top.stderr is not None
        assert top.stdout.readline().startswith(b"{")
        top.send_signal(number)
        assert (top.wait(60), top.stderr.read()) == (0, b"")
    server.stop(None).wait()


class Idle(AdminServicer):
    """A router without groups."""

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(router="router-0", state="serving")


def test_help_and_version_are_0() -> None:
    """Both succeed."""
    assert [run_here(*words).code for words in (["--help"], ["--version"], ["plan", "--help"])] == [0, 0, 0]
