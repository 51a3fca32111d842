"""Errors have the form of the API that was called, wherever they arise."""

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]  # made by protoc

from coatcheck.proto.errors import (
    CoatcheckError,
    ContextLengthExceeded,
    GrpcCode,
    InvalidParameter,
    NotFound,
    Overloaded,
    Poisoned,
)
from coatcheck.router.config import MESSAGE_BYTES
from coatcheck.router.http.errors import (
    anthropic_error,
    connect_error,
    error_response,
    grpc_status,
    openai_error,
    report_error,
    report_refusal,
)
from tests.router.access.key_holders import write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter

CALL = "/coatcheck.v1.Generation/Generate"


def test_the_forms_of_an_error() -> None:
    """An exception has one message and one status in all APIs; each adds what its clients look for."""
    report = report_error(Overloaded("the queue is full", retry_seconds=2.4))
    assert openai_error(report) == {
        "error": {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": None}
    }
    assert anthropic_error(report) == {
        "type": "error", "error": {"type": "rate_limit_error", "message": "the queue is full"}
    }  # fmt: skip
    made = connect_error(report)
    assert (made["code"], made["message"]) == ("resource_exhausted", "the queue is full")
    (detail,) = made["details"]
    waits = RetryInfo.FromString(base64.b64decode(detail["value"] + "=" * (-len(detail["value"]) % 4)))
    assert detail["type"] == "google.rpc.RetryInfo" and waits.retry_delay.ToNanoseconds() == 2_400_000_000
    status = grpc_status(report)
    assert (status.code, status.message, len(status.details)) == (GrpcCode.RESOURCE_EXHAUSTED, "the queue is full", 1)
    assert error_response(report, "/v1/messages").headers["retry-after"] == "2"


def test_the_status_of_connect_is_that_of_its_code() -> None:
    """ABORTED is 409 in Connect, and 500 elsewhere."""
    report = report_error(Poisoned("it crashed two groups"))
    assert [error_response(report, path).status_code for path in (CALL, "/v1/completions")] == [409, 500]


@pytest.mark.parametrize(
    ("error", "path", "param", "code"),
    [
        (ContextLengthExceeded("too long"), "/v1/chat/completions", "messages", "context_length_exceeded"),
        (ContextLengthExceeded("too long"), "/tokenize", None, "context_length_exceeded"),
        (InvalidParameter("stop[3] entry"), "/v1/completions", "stop", None),
        (NotFound("no such model"), "/v1/completions", None, "model_not_found"),
    ],
)
def test_openai_s_param_and_code(error: CoatcheckError, path: str, param: str | None, code: str | None) -> None:
    """The wrong field is named as the request has it."""
    made = openai_error(report_error(error, path))["error"]
    assert (made["param"], made["code"]) == (param, code)


def test_what_is_not_for_users_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The client gets the number of an incident, in every API the same words."""
    for error in (ValueError("secret"), CoatcheckError("secret")):
        with caplog.at_level(logging.ERROR):
            report = report_error(error)
        number = report.message.rpartition(" ")[2]
        assert number in caplog.text and "secret" in caplog.text and "secret" not in report.message
        assert report.status == 500 and grpc_status(report).code == GrpcCode.INTERNAL


def test_a_message_is_cut() -> None:
    """A message may quote input of any length, so every API gets a short one; gRPC's is cut to bytes."""
    report = report_error(InvalidParameter("ä" * 5000))
    assert len(report.message) == len(report.param or "") == len(report_refusal(415, "ä" * 5000).message) == 1001
    assert len(openai_error(report)["error"]["message"]) == len(connect_error(report)["message"]) == 1001
    assert len(grpc_status(report).message.encode()) < 1010


FORMS: dict[str, Any] = {
    "/v1/completions": lambda made: made["error"]["message"] and "code" in made["error"],
    "/v1/messages": lambda made: made["type"] == "error" and made["error"]["type"] and made["error"]["message"],
    CALL: lambda made: made["code"] == made["code"].lower() and made["message"],
}


@pytest.mark.parametrize("path", FORMS)
async def test_refusals_before_the_endpoint(start_http_router: StartHttpRouter, tmp_path: Path, path: str) -> None:
    """A missing key, a foreign host, a compressed or long body, an unknown path: the form is that of the API too."""
    router = await start_http_router(FakeGroup())
    keyed = await start_http_router(FakeGroup("g1"), key_file=write_keys(tmp_path / "keys.yaml"))
    refused = {
        401: await keyed.request("POST", path, {}),
        403: await router.request("POST", path, {}, {"host": "evil.example"}),
        404: await router.request("POST", f"{path}/nothing", {}),
        405: await router.request("PUT", path, {}),
        413: await router.request("POST", path, None, {"content-length": str(MESSAGE_BYTES + 1)}),
        415: await router.request("POST", path, {}, {"content-encoding": "gzip"}),
    }
    for status, (got, headers, text) in refused.items():
        assert got == status and headers["content-type"] == "application/json", text
        assert FORMS[path](json.loads(text)), text


async def test_a_lone_surrogate_is_the_client_s_error(start_http_router: StartHttpRouter) -> None:
    """JSON can escape a character that no text has."""
    router = await start_http_router(FakeGroup())
    for path, body in (
        ("/v1/completions", rb'{"prompt": "\ud800"}'),
        ("/v1/messages", rb'{"max_tokens": 2, "messages": [{"role": "user", "content": "\ud800"}]}'),
        (CALL, rb'{"text": "\ud800"}'),
    ):
        status, _, text = await router.request("POST", path, body)
        assert status == 400 and FORMS[path](json.loads(text)), text
