"""The Connect protocol on the HTTP port: unary and streaming calls, in JSON and in protobuf."""

import asyncio
import http.client
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router import connect_handlers
from coatcheck.router.event_loop.side_process import SideProcesses
from tests.router.access.key_holders import EYES, SEARCH, write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter

BASE = "/coatcheck.v1.Generation"
ASKED: dict[str, Any] = {"text": "a fox", "sampling": {"maxTokens": 4, "seed": "7"}}


async def post(
    router: HttpRouter, method: str, body: bytes, kind: str, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """(status, body) of a call."""

    def send() -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(router.http_address, timeout=MAX_WAIT_SECONDS)
        try:
            connection.request("POST", f"{BASE}/{method}", body, {"content-type": kind, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def envelopes(body: bytes) -> list[tuple[int, bytes]]:
    """(flags, message) of each envelope."""
    found = []
    while body:
        flags, length = struct.unpack_from(">BI", body)
        found.append((flags, body[5 : 5 + length]))
        body = body[5 + length :]
    return found


async def test_unary_calls(start_http_router: StartHttpRouter) -> None:
    """A call gets the same message as over gRPC, in the form of the request."""
    router = await start_http_router(FakeGroup())
    wanted = await router.generation.Generate(
        pb.GenerateRequest(text="a fox", sampling=pb.SamplingParams(max_tokens=4, seed=7))
    )
    status, text = await post(router, "Generate", json.dumps(ASKED).encode(), "application/json")
    assert status == 200 and json.loads(text)["choices"][0]["text"] == wanted.choices[0].text
    message = pb.GenerateRequest(text="a fox", sampling=pb.SamplingParams(max_tokens=4, seed=7))
    status, data = await post(router, "Generate", message.SerializeToString(), "application/proto")
    assert status == 200 and pb.GenerateResponse.FromString(data).choices == wanted.choices
    status, text = await post(router, "GetModel", b"{}", "application/json; charset=utf-8")
    assert status == 200 and json.loads(text)["maxModelLen"] == 256
    status, text = await post(router, "Tokenize", b'{"text": "a fox"}', "application/json")
    ids = json.loads(text)["tokenIds"]
    status, text = await post(router, "Detokenize", json.dumps({"tokenIds": ids}).encode(), "application/json")
    assert json.loads(text) == {"text": "a fox"}


@pytest.mark.parametrize("kind", ["json", "proto"])
async def test_a_streaming_call(start_http_router: StartHttpRouter, kind: str) -> None:
    """Each event is in an envelope, and the last envelope ends the stream."""
    router = await start_http_router(FakeGroup())
    message = pb.GenerateRequest(text="a fox", sampling=pb.SamplingParams(max_tokens=4, seed=7))
    data = json.dumps(ASKED).encode() if kind == "json" else message.SerializeToString()
    body = struct.pack(">BI", 0, len(data)) + data
    status, got = await post(router, "GenerateStream", body, f"application/connect+{kind}")
    *events, (flags, end) = envelopes(got)
    assert (status, flags, json.loads(end)) == (200, 2, {}) and {flag for flag, _ in events} == {0}
    names = [
        next(iter(json.loads(event))) if kind == "json" else pb.GenerateEvent.FromString(event).WhichOneof("event")
        for _, event in events
    ]
    assert (names[0], names[-1]) == ("started", "final") and "delta" in names


async def test_errors_have_connect_s_form(start_http_router: StartHttpRouter) -> None:
    """The code and the message, with the status of the code; in a stream they are in its last envelope."""
    router = await start_http_router(FakeGroup())
    for body, code, status in (
        (b'{"model": "other", "text": "a"}', "not_found", 404),
        (b'{"text": "a", "sampling": {"topP": 2}}', "invalid_argument", 400),
        (b'{"bogus": 1}', "invalid_argument", 400),
        (b"{", "invalid_argument", 400),
    ):
        got, text = await post(router, "Generate", body, "application/json")
        assert (got, json.loads(text)["code"]) == (status, code) and json.loads(text)["message"], text
        stream = struct.pack(">BI", 0, len(body)) + body
        got, text = await post(router, "GenerateStream", stream, "application/connect+json")
        ((flags, end),) = envelopes(text)
        assert (got, flags, json.loads(end)["error"]["code"]) == (200, 2, code)
    for stream in (b"", struct.pack(">BI", 1, 0), struct.pack(">BI", 0, 9)):
        _, text = await post(router, "GenerateStream", stream, "application/connect+json")
        assert json.loads(envelopes(text)[0][1])["error"]["code"] == "invalid_argument"
    assert (await post(router, "Generate", b"{}", "text/plain"))[0] == 415
    assert (await post(router, "GenerateStream", b"{}", "application/json"))[0] == 415
    assert router.server.traffic.active == 0


@pytest.mark.parametrize(("method", "kind"), [("Generate", "json"), ("GenerateStream", "connect+json")])
async def test_a_body_of_too_many_values(
    start_http_router: StartHttpRouter, caplog: pytest.LogCaptureFixture, method: str, kind: str
) -> None:
    """The body is refused while it arrives. That is the client's error, so the log has no incident."""
    router = await start_http_router(FakeGroup())
    status, text = await post(router, method, b"," * ((1 << 21) + 1), f"application/{kind}")
    assert (status, json.loads(text)["code"]) == (413, "resource_exhausted")
    assert "incident" not in caplog.text and "Traceback" not in caplog.text


async def test_long_messages_are_encoded_in_a_side_process(
    start_http_router: StartHttpRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is the same wherever its JSON is made; the event loop makes only that of short messages."""
    router = await start_http_router(FakeGroup(with_tops=True))
    body = json.dumps({"text": "a fox", "sampling": {"maxTokens": 4, "seed": "7", "logprobs": 3}}).encode()
    monkeypatch.setattr(connect_handlers, "_LONG_ANSWER_BYTES", 1 << 30)
    in_place = json.loads((await post(router, "Generate", body, "application/json"))[1])["choices"]
    monkeypatch.setattr(connect_handlers, "_LONG_ANSWER_BYTES", 0)
    called: list[str] = []
    run = SideProcesses.run_unlimited

    async def run_and_record(side: SideProcesses, function: Callable[..., Any], *arguments: Any) -> Any:
        called.append(function.__name__)
        return await run(side, function, *arguments)

    monkeypatch.setattr(SideProcesses, "run_unlimited", run_and_record)
    status, text = await post(router, "Generate", body, "application/json")
    assert (status, json.loads(text)["choices"]) == (200, in_place) and called == ["_to_json"]


async def test_a_key_is_needed(start_http_router: StartHttpRouter, tmp_path: Any) -> None:
    """As for OpenAI's endpoints; a monitor may not generate."""
    router = await start_http_router(FakeGroup(), key_file=write_keys(tmp_path / "keys.yaml"))
    for key, status in ((SEARCH, 200), (EYES, 403), ("wrong", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await post(router, "GetModel", b"{}", "application/json", headers))[0] == status
