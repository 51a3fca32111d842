"""`coatcheck batch`: its files, its answers, and how a run goes on."""

import json
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client import batch
from coatcheck.cluster.client.batch import Sender, open_output, read_requests
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.proto.errors import InvalidConfig
from tests.cluster.command_line import run_here
from tests.cluster.running_server import COMMAND


class Server(ThreadingHTTPServer):
    """Answers with the prompt in capitals; refuses the prompt `bad`; is full for the first `full` requests; ends the
    connection amid the first `cut` answers; answers a request after `checks_per_request` checks of its health.
    `checks`: how often its health was asked for. While `hides_health` is set, no check is answered."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.full = 0
        self.cut = 0
        self.checks_per_request = 0
        self.checks = 0
        self.checked = threading.Condition()
        self.hides_health = False
        self.ended = threading.Event()
        self.seen: list[tuple[str, dict[str, Any], str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        """As a router would."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, body, self.headers.get("authorization", "")))
        with self.server.checked:
            until = self.server.checks + self.server.checks_per_request
            assert self.server.checked.wait_for(lambda: self.server.checks >= until, MAX_WAIT_SECONDS)
        status = 400 if body["prompt"] == "bad" else 200
        if self.server.full:
            self.server.full -= 1
            status = 429
        data = json.dumps({"text": body["prompt"].upper()}).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("retry-after", "0")
        self.send_header("x-request-id", "r1")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: 5 if self.server.cut else None])
        self.server.cut = max(self.server.cut - 1, 0)

    def do_GET(self) -> None:
        """The health."""
        with self.server.checked:
            self.server.checks += 1
            self.server.checked.notify_all()
        if self.server.hides_health:
            self.server.ended.wait()
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on a free port."""
    made = Server()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.ended.set()
    made.shutdown()
    thread.join()
    made.server_close()


def write_requests(path: Path, *prompts: str) -> Path:
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for n, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, tuple[int, Any]]:
    """(status, body) of each answer by its custom_id."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in found}


def test_each_request_gets_an_answer(server: Server, tmp_path: Path) -> None:
    """Answers have the request's custom_id, in OpenAI's form. A server that is full is asked again. A failure is an
    answer too, and the exit code is 1."""
    source, output = write_requests(tmp_path / "in.jsonl", "a", "b", "bad"), tmp_path / "out.jsonl"
    server.full = 2
    done = run_here("batch", str(source), "-o", str(output), "--server", f"{server.url}/v1", "--api-key", "k")
    assert done.code == 1 and "3 requests sent, 1 failed" in done.err
    assert answers(output) == {"q0": (200, {"text": "A"}), "q1": (200, {"text": "B"}), "q2": (400, {"text": "BAD"})}
    line = json.loads(output.read_text().splitlines()[0])
    assert line["error"] is None and line["response"]["request_id"] == "r1" and line["id"].startswith("batch_req_")
    assert {(path, key) for path, _, key in server.seen} == {("/v1/completions", "Bearer k")}


def test_a_run_goes_on(server: Server, tmp_path: Path) -> None:
    """Answers are kept; failures and a line that was cut are asked again."""
    source, output = write_requests(tmp_path / "in.jsonl", "a", "bad"), tmp_path / "out.jsonl"
    assert run_here("batch", str(source), "-o", str(output), "--server", server.url).code == 1
    with output.open("a") as file:
        file.write('{"custom_id": "q2", "respon')
    write_requests(source, "a", "good", "c")
    server.seen.clear()
    done = run_here("batch", str(source), "-o", str(output), "--server", server.url)
    assert done.code == 0 and "1 answer in" in done.err
    assert {body["prompt"] for _, body, _ in server.seen} == {"good", "c"}
    assert answers(output) == {"q0": (200, {"text": "A"}), "q1": (200, {"text": "GOOD"}), "q2": (200, {"text": "C"})}


def test_an_answer_that_is_cut_is_asked_again(server: Server, tmp_path: Path) -> None:
    """A server that ends amid an answer, as a killed router does, is asked again, also if the answer is a refusal."""
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    server.cut = 1
    done = run_here("batch", str(source), "-o", str(output), "--server", server.url)
    assert done.code == 0 and answers(output) == {"q0": (200, {"text": "A"})}
    refused = write_requests(tmp_path / "refused.jsonl", "bad")
    server.cut = 1
    done = run_here("batch", str(refused), "-o", str(tmp_path / "bad.jsonl"), "--server", server.url)
    assert done.code == 1 and answers(tmp_path / "bad.jsonl") == {"q0": (400, {"text": "BAD"})}


def test_a_server_that_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that accepts connections and is silent, as a suspended one, ends the run with an error."""
    monkeypatch.setattr(batch, "_CHECK_SECONDS", 0.2)
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = run_here("batch", str(source), "-o", str(output), "--server", url)
    assert done.code == 1 and f"{url} answers neither requests nor GET /health" in done.err and not answers(output)


def test_the_port_of_grpc_is_no_server(tmp_path: Path) -> None:
    """Given the router's gRPC address, the run ends at the first answer, and says which address to give."""
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    other = grpc.server(ThreadPoolExecutor(1))
    url = f"http://127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    done = run_here("batch", str(source), "-o", str(output), "--server", url)
    other.stop(None)
    assert done.code == 1 and done.err.startswith(f"error: {url} does not speak HTTP: give"), done.err
    assert done.err.count("\n") == 1 and not answers(output)


def test_an_output_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    """If the disk takes no more of the answers, the error names their file, and a later run goes on."""
    source, output = write_requests(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl"
    command = ["batch", str(source), "-o", str(output), "--server", server.url]
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (300, 300))  # one answer and a part of the other
    done = subprocess.run([*COMMAND, *command], stderr=subprocess.PIPE, text=True, preexec_fn=limited)
    assert (done.returncode, done.stderr) == (1, f"error: {output}: File too large\n")
    assert run_here(*command).code == 0
    assert answers(output) == {"q0": (200, {"text": "A"}), "q1": (200, {"text": "B"})}


def test_an_answer_that_takes_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path
) -> None:
    """While an answer is computed, a server that answers for its health is not given up."""
    monkeypatch.setattr(batch, "_CHECK_SECONDS", 0.5)
    server.checks_per_request = batch._MAX_MISSED_CHECKS + 1
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    assert run_here("batch", str(source), "-o", str(output), "--server", server.url).code == 0
    assert answers(output) == {"q0": (200, {"text": "A"})}


def test_a_server_that_answers_requests_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path
) -> None:
    """Checks that a busy server misses do not add up over the answers that it gives between them."""
    monkeypatch.setattr(batch, "_CHECK_SECONDS", 0.5)
    server.checks_per_request, server.hides_health = 1, True
    prompts = "abcde"[: batch._MAX_MISSED_CHECKS + 1]
    source, output = write_requests(tmp_path / "in.jsonl", *prompts), tmp_path / "out.jsonl"
    done = run_here("batch", str(source), "-o", str(output), "--server", server.url, "--concurrency", "1")
    assert (done.code, len(answers(output))) == (0, len(prompts)), done.err


def test_an_error_of_any_type_ends_the_run(monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path) -> None:
    """An IndexError while a request is sent is raised. The run does not wait for that request."""

    def fail(*_: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(Sender, "send", fail)
    monkeypatch.setattr(batch, "_CHECK_SECONDS", 0.1)
    request = batch.BatchRequest("q0", "/v1/completions", {"prompt": "a"})
    with pytest.raises(IndexError):
        list(batch._send_all(Sender(server.url, Credentials()), [request], 1))


@pytest.mark.parametrize(
    "server", ["http://", "http://h:port", "http://h:99999", "http://[::1", "http://a b", "ftp://h"]
)
def test_a_server_that_is_no_url_is_refused(tmp_path: Path, server: str) -> None:
    """It is refused at once, and not asked again and again."""
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    done = run_here("batch", str(source), "-o", str(output), "--server", server)
    assert done.code == 2 and f"--server is {server!r}; it must" in done.err


def test_line_separators_within_a_text(server: Server, tmp_path: Path) -> None:
    """A line ends at a line feed alone: JSON may contain U+2028, U+2029 and U+0085 as they are."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "q\u2028", "url": "/v1/completions", "body": {"prompt": "a\u2028b\u2029c\x85d"}}
    source.write_text(json.dumps(line, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert run_here("batch", str(source), "-o", str(output), "--server", server.url).code == 0
    assert [body["prompt"] for _, body, _ in server.seen] == ["a\u2028b\u2029c\x85d"]
    text = json.dumps(json.loads(output.read_text()), ensure_ascii=False)
    output.write_text(f"{text}\n", encoding="utf-8")
    assert answered(output) == {"q\u2028"}


@pytest.mark.parametrize(
    "text",
    [
        '{"custom_id": "q0", "url": "/v1/completions", "body": {"prompt": "a"}}\n',
        '{"custom_id": "q0", "respon\n{"custom_id": "q1", "response": null}\n',
        "notes\n",
        "notes",
        "[1]",
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_no_output_is_not_changed(server: Server, tmp_path: Path, text: str | bytes) -> None:
    """Such as the input, given as --output by mistake."""
    path = tmp_path / "requests.jsonl"
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(data)
    source = write_requests(tmp_path / "in.jsonl", "a")
    done = run_here("batch", str(source), "-o", str(path), "--server", server.url)
    assert done.code == 2 and f"--output is {path}, wh" in done.err and "a new file" in done.err
    assert path.read_bytes() == data and not server.seen


def test_an_error_with_the_status_of_a_success_is_asked_again(tmp_path: Path) -> None:
    """A proxy may answer with a page of its own; the error of a response that succeeded is null."""
    lines = [
        {"custom_id": name, "response": {"status_code": 200, "body": body}}
        for name, body in (("page", {"error": {"message": "<html>"}}), ("list", []), ("answer", {"error": None}))
    ]
    output = tmp_path / "out.jsonl"
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert answered(output) == {"answer"}


def test_a_body_of_a_stream_is_sent_as_one_of_a_whole_answer(tmp_path: Path) -> None:
    """Servers refuse `stream_options` without `stream`. The file may begin with a byte order mark."""
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    path = tmp_path / "in.jsonl"
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body})
    path.write_text(line, encoding="utf-8-sig")
    (request,) = read_requests(path)
    assert request.body == {"prompt": "a", "stream": False}


def answered(output: Path) -> set[str]:
    """The custom_ids that a new run would not send again."""
    with open_output(output) as (_, done):
        return done


def test_a_server_on_this_host_is_asked_without_a_proxy(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a proxy in the environment that nobody runs, a server on loopback is reached."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("coatcheck.cluster.client.batch._MAX_SENDS", 1)
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    assert run_here("batch", str(source), "-o", str(output), "--server", server.url).code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is not JSON"),
        ('{"a":' * 100_000, "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('\n{"custom_id": 1, "body": {}}', "line 2: it needs custom_id"),
        (
            '{"custom_id": "a", "body": {}, "url": "/v1/audio/speech"}',
            "url is '/v1/audio/speech'; it must be one of /v1/chat",
        ),
        ('{"custom_id": "a", "body": {}, "url": "/v1/messages"}\n' * 2, "line 2: custom_id 'a' is in an earlier line"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    """Nothing is sent if a line of the input is wrong."""
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=words):
        read_requests(path)


def test_what_else_is_refused(tmp_path: Path) -> None:
    """A missing input and a server that is no URL; an output that is a directory or a device."""
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_requests(tmp_path / "missing")
    with pytest.raises(InvalidConfig, match="must begin with http"):
        Sender("127.0.0.1:8000", Credentials())
    for output in (tmp_path, Path("/dev/null")):
        with pytest.raises(InvalidConfig, match="not a regular file"), open_output(output):
            pass


def test_an_output_in_a_folder_that_does_not_exist(server: Server, tmp_path: Path) -> None:
    """The command ends with 2 and names the folder, before it sends a request; it makes no folder."""
    source = write_requests(tmp_path / "in.jsonl", "a")
    done = run_here("batch", str(source), "-o", str(tmp_path / "none" / "out.jsonl"), "--server", server.url)
    assert done.code == 2 and f"there is no folder {tmp_path / 'none'}; make it, or give another file" in done.err
    assert not server.seen and not (tmp_path / "none").exists()


def test_an_output_that_another_run_writes_is_refused(server: Server, tmp_path: Path) -> None:
    """Two runs at once would each lose the other's answers. The second sends nothing, and the first goes on."""
    source, output = write_requests(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    command = ("batch", str(source), "-o", str(output), "--server", server.url)
    with open_output(output):
        done = run_here(*command)
        assert done.code == 2 and "another `coatcheck batch` writes to" in done.err and not server.seen
    assert run_here(*command).code == 0
    assert answered(output) == {"q0"}


def test_embeddings_and_reranking_are_sent_as_they_are(tmp_path: Path) -> None:
    """Only requests that generate tokens are sent with `stream`, which the others do not know."""
    body = {"model": "m", "input": ["a", "b"]}
    path = tmp_path / "in.jsonl"
    urls = ("/v1/embeddings", "/v1/score", "/rerank")
    path.write_text("".join(json.dumps({"custom_id": url, "url": url, "body": body}) + "\n" for url in urls))
    assert [(request.url, request.body) for request in read_requests(path)] == [(url, body) for url in urls]
