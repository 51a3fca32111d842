"""`coatcheck batch`: sends the requests of a file to a running server, and writes the answers to another file.

The files have OpenAI's batch format: one JSON object on each line. Answers are written in the order in which they come.
After an interruption the same command continues: answers in the output are kept, and only the other requests are sent.
"""

import errno
import fcntl
import http.client
import json
import os
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import Empty, Queue
from typing import Annotated, Any, Final

import typer

from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.proto.host_port import is_loopback

_GENERATING: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SCORING: Final = ("/v1/embeddings", "/v2/embed", "/v1/score", "/score", "/rerank", "/v1/rerank", "/v2/rerank")
_URLS: Final = (*_GENERATING, *_SCORING)
_GIVE_OUTPUT: Final = "give the output of an earlier run, or a new file"
_MAX_SENDS: Final = 8  # of a request that finds the server full or gone
_MAX_WAIT_SECONDS: Final = 30.0
# An answer may take minutes. After each _CHECK_SECONDS without one, the server is asked for its health, and has
# _CHECK_SECONDS to reply. A server that misses this many checks in a row hangs: it is silent for 30 s. A router may be
# suspended for less.
_CHECK_SECONDS: Final = 5.0
_MAX_MISSED_CHECKS: Final = 3


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@with_credentials
def batch(
    input_file: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests in OpenAI's batch format (.jsonl).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for the answers. Its answers are kept.")],
    server: Annotated[str, typer.Option(help="The address of the server for HTTP.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 64,
    *,
    credentials: Credentials,
) -> None:
    """Send the requests of a file, with a progress bar, and write the answers. Run it again to continue."""
    from rich.console import Console
    from rich.progress import Progress

    requests = read_requests(input_file)
    sender = Sender(server, credentials)
    failed = 0
    console = Console(stderr=True)
    with open_output(output) as (file, done), Progress(console=console, disable=not console.is_terminal) as bar:
        unanswered = [request for request in requests if request.custom_id not in done]
        if len(unanswered) < len(requests):
            print(f"{counted(len(requests) - len(unanswered), 'answer')} in {output} already", file=sys.stderr)
        task = bar.add_task("requests", total=len(requests), completed=len(requests) - len(unanswered))
        for line in _send_all(sender, unanswered, concurrency):
            failed += not _is_success(line)
            _write(file, json.dumps(line) + "\n", output)
            bar.advance(task)
    print(f"{counted(len(unanswered), 'request')} sent, {failed} failed; the answers are in {output}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _send_all(sender: "Sender", requests: list[BatchRequest], concurrency: int) -> Iterator[dict[str, Any]]:
    """Yields the output line of each request, when its answer comes. Raises Unavailable if there is no server, or if
    the server hangs."""
    waiting = deque(requests)
    sent: Queue[dict[str, Any] | Exception] = Queue()

    def send() -> None:
        while True:
            try:
                request = waiting.popleft()
            except IndexError:  # no request is left
                return
            try:
                sent.put(sender.send(request))
            except Exception as error:
                sent.put(error)

    # A thread that reads from a server that hangs cannot be stopped. The process does not wait for daemon threads.
    for _ in range(min(concurrency, len(requests))):
        threading.Thread(target=send, daemon=True).start()
    for _ in requests:
        missed_checks = 0  # since the last answer to a request or a check
        while True:
            try:
                line = sent.get(timeout=_CHECK_SECONDS)
                break
            except Empty:
                missed_checks = 0 if sender.is_answering() else missed_checks + 1
            if missed_checks == _MAX_MISSED_CHECKS:
                raise Unavailable(
                    f"{sender.server} answers neither requests nor GET /health: its router hangs, or another program "
                    "listens there; the answers so far are kept; run the same command again to send the other requests"
                )
        if isinstance(line, Exception):
            raise line
        yield line


def read_requests(path: Path) -> list[BatchRequest]:
    """The requests of an input file. Raises InvalidConfig that names the line, for a line that is not a request or that
    repeats a custom_id."""
    found: dict[str, BatchRequest] = {}
    for number, value in _lines(path):
        custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
        if not isinstance(custom_id, str) or not isinstance(body, dict):
            raise InvalidConfig(f"{path}, line {number}: it needs custom_id (a text) and body (an object)")
        if url not in _URLS:
            raise InvalidConfig(f"{path}, line {number}: url is {url!r}; it must be one of {', '.join(_URLS)}")
        if custom_id in found:
            raise InvalidConfig(f"{path}, line {number}: custom_id {custom_id!r} is in an earlier line too")
        if url in _GENERATING:
            body = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
        found[custom_id] = BatchRequest(custom_id, url, body)
    return list(found.values())


@contextmanager
def open_output(path: Path) -> Iterator[tuple[FileIO, set[str]]]:
    """Yields (the output, open to append; the custom_ids that it has answers for), and locks the output.

    Lines of failed requests are removed, and an incomplete last line. Raises InvalidConfig, and changes nothing, for a
    file that is not the output of a batch, such as the input, and for a file that another run writes."""
    if path.exists() and not path.is_file():
        raise InvalidConfig(f"--output is {path}, which is not a regular file; {_GIVE_OUTPUT}")
    if not path.parent.is_dir():
        raise InvalidConfig(f"--output is {path}, but there is no folder {path.parent}; make it, or give another file")
    with path.open("ab", buffering=0) as present:
        _lock(present)
        answers = _read_answers(path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb", buffering=0) as file:
            try:
                _lock(file)  # before the file has the name under which another run would open it
                _write(file, "".join(f"{line}\n" for line in answers.values()), path)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            yield file, set(answers)


def _lock(file: FileIO) -> None:
    """Lock a file until it is closed. Raises InvalidConfig if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidConfig(f"another `coatcheck batch` writes to {file.name}; wait, or name another output") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
            raise


def _read_answers(path: Path) -> dict[str, str]:
    """custom_id -> line, for each answer in an output. Raises InvalidConfig for a file that is not an output."""
    answers: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # str.splitlines also splits at U+2028, as in a prompt
    except UnicodeDecodeError:
        raise InvalidConfig(f"--output is {path}, which is not text in UTF-8; {_GIVE_OUTPUT}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and line.startswith("{"):  # an interrupted run wrote only a part of it
                continue
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str) or "response" not in value:
            raise InvalidConfig(f"--output is {path}, whose line {number} is not an answer; {_GIVE_OUTPUT}")
        if _is_success(value):
            answers[value["custom_id"]] = line
    return answers


def _write(file: FileIO, text: str, path: Path) -> None:
    """Writes all of `text`. Raises OSError with `path` as its file name, for example if the disk is full."""
    data = memoryview(text.encode())
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


class Sender:
    """Sends requests over HTTP. Several threads may use it."""

    def __init__(self, server: str, credentials: Credentials) -> None:
        if not server.startswith(("http://", "https://")):
            raise InvalidConfig(f"--server is {server!r}; it must begin with http:// or https://")
        self.server = server.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", **dict(credentials.metadata)}
        is_https = server.startswith("https://")
        context = (credentials.https or ssl.create_default_context()) if is_https else None
        # A proxy, such as http_proxy names, cannot reach this host's loopback interface.
        proxies = [urllib.request.ProxyHandler({})] if is_loopback(_host_of(server)) else []
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), *proxies)

    def is_answering(self) -> bool:
        """Whether the server replies to GET /health within _CHECK_SECONDS. Also True if the connection fails at once,
        because then `send` fails too, and raises Unavailable after its last attempt."""
        try:
            with self._open(urllib.request.Request(f"{self.server}/health", headers=self._headers), _CHECK_SECONDS):
                return True
        except TimeoutError:
            return False
        except urllib.error.URLError as error:
            return not isinstance(error.reason, TimeoutError)
        except (OSError, http.client.HTTPException):
            return True

    def send(self, request: BatchRequest) -> dict[str, Any]:
        """The output line of a request. Sends the request again while the server is full or restarts. Raises
        Unavailable if there is no server."""
        data = json.dumps(request.body).encode()
        message = urllib.request.Request(self.server + request.url, data, self._headers)
        for resends in range(_MAX_SENDS):
            is_last = resends == _MAX_SENDS - 1
            try:
                with self._open(message) as response:
                    if response.status not in (429, 503) or is_last:
                        return _line(request, response.status, response.headers, response.read())
                    retry_after = response.headers.get("retry-after", "")
            except (OSError, http.client.HTTPException) as error:  # HTTPException: the connection ended amid a response
                if isinstance(error, http.client.BadStatusLine) and not isinstance(error, ConnectionError):
                    raise Unavailable(
                        f"{self.server} does not speak HTTP: give the router's HTTP address as --server, the second "
                        "one in the line that begins with `ready:`"
                    ) from None
                if refusal := _refusal_of_tls(error):
                    raise Unavailable(
                        f"no TLS connection to {self.server}: {refusal}; see --tls-ca, --tls-cert and --tls-key"
                    ) from None
                if is_last:
                    raise Unavailable(f"no answer from {self.server}: {getattr(error, 'reason', error)}") from None
                retry_after = ""
            wait = float(retry_after) if retry_after.isdecimal() else 0.5 * 2.0**resends
            time.sleep(min(wait, _MAX_WAIT_SECONDS))
        raise AssertionError("the last send returns or raises")

    def _open(self, message: urllib.request.Request, timeout: float | None = None) -> Any:
        """The response, with any status. Its body is not read yet."""
        try:
            return self._opener.open(message, timeout=timeout)
        except urllib.error.HTTPError as error:
            return error


def _refusal_of_tls(error: Exception) -> str:
    """Why one side refuses the other's certificate, or does not speak TLS; "" for any other error."""
    at_connecting = getattr(error, "reason", None)
    if isinstance(at_connecting, ssl.SSLError):
        return str(at_connecting)
    # With TLS 1.3 the server refuses a client's certificate, or the lack of one, after the handshake.
    return str(error) if isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason) else ""


def _host_of(server: str) -> str:
    """The host in a URL. Raises InvalidConfig for a text that is not a URL with a host."""
    try:
        parts = urllib.parse.urlsplit(server)
        is_url = parts.port != 0 and not re.search(r"[\s\x00-\x1f\x7f]", server)  # `port` raises ValueError too
    except ValueError:
        is_url = False
    if not is_url or not parts.hostname:
        raise InvalidConfig(f"--server is {server!r}; it must be a URL such as http://127.0.0.1:8000")
    return parts.hostname


def _line(request: BatchRequest, status: int, headers: Any, data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = {"error": {"message": data[:1000].decode(errors="replace")}}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body},
        "error": None,
    }


def _is_success(line: dict[str, Any]) -> bool:
    """Whether the line has an answer. A proxy may send an error with the status 200."""
    response = line.get("response")
    if not isinstance(response, dict) or response.get("status_code") != 200:
        return False
    body = response.get("body")
    return isinstance(body, dict) and not body.get("error")


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line that is not empty. Raises InvalidConfig."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some programs on Windows begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise InvalidConfig(f"{path}, line {number} is not a JSON object")
        yield number, value
