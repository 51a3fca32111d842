"""Errors as clients get them. An ErrorReport holds the facts, and one function for each API formats them:

| API | function |
|---|---|
| OpenAI, and every other HTTP API | `openai_error` |
| Anthropic, by its path | `anthropic_error` |
| Connect, by its path | `connect_error` |
| gRPC | `grpc_status` |
"""

import base64
import logging
import uuid
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]  # made by protoc
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # as above

from coatcheck.proto.errors import (
    CoatcheckError,
    ContextLengthExceeded,
    GrpcCode,
    InvalidParameter,
    InvalidRequest,
    NotFound,
    Overloaded,
    status_of,
)
from coatcheck.router.http.json_response import AsciiJsonResponse

_log = logging.getLogger(__name__)
ANTHROPIC_PATH: Final = "/v1/messages"
CONNECT_PATH: Final = "/coatcheck.v1.Generation/"
LONE_SURROGATE: Final = "a text has a lone surrogate, which is not a character; remove it"
_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 405: "invalid_request_error", 408: "invalid_request_error",
                 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
                 431: "invalid_request_error", 501: "invalid_request_error"}  # fmt: skip
_ANTHROPIC_TYPES: Final = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
# OpenAI's error codes; its clients tell errors apart by them.
_CODES: Final = {NotFound: "model_not_found", ContextLengthExceeded: "context_length_exceeded"}
# The field that holds the prompt.
_PROMPT_FIELDS: Final = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}
# gRPC's codes of refusals without an exception, by HTTP status; any other status is INVALID_ARGUMENT.
_CODE_OF_STATUS: Final = {403: GrpcCode.PERMISSION_DENIED, 404: GrpcCode.UNIMPLEMENTED, 405: GrpcCode.UNIMPLEMENTED,
                          408: GrpcCode.DEADLINE_EXCEEDED, 413: GrpcCode.RESOURCE_EXHAUSTED,
                          501: GrpcCode.UNIMPLEMENTED, 503: GrpcCode.UNAVAILABLE}  # fmt: skip
# The HTTP status of a code in the Connect protocol, where it differs from the status in other APIs.
_CONNECT_STATUS: Final = {GrpcCode.ABORTED: 409, GrpcCode.FAILED_PRECONDITION: 400}
# A message may quote input of any length.
_MESSAGE_CHARACTERS: Final = 1000
# Max bytes of a message over gRPC. Metadata is limited to 8 KiB and contains the message twice: as it is, and
# percent-encoded, which may be three times as long.
_GRPC_BYTES: Final = 1000


class InvalidBody(InvalidRequest):
    """A body that its endpoint's schema refuses. `field`: the wrong field, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class UnsupportedThread(InvalidRequest):
    """A request with Anthropic's field `thread`, for which the server would have to keep the conversation."""

    def __init__(self) -> None:
        super().__init__("Unsupported parameter 'thread'; remove it, and send the whole conversation")


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """The facts of an error that a client gets, in any API. `status`: the HTTP status. `message`: at most 1,001
    characters. `param`: the wrong field. `error`: the exception, if there is one."""

    status: int
    code: GrpcCode
    message: str
    param: str | None = None
    error: BaseException | None = None

    @property
    def retry_seconds(self) -> float | None:
        """Seconds after which the client should try again; None if that is not known."""
        return self.error.retry_seconds if isinstance(self.error, Overloaded) else None


def report_error(error: BaseException, path: str = "") -> ErrorReport:
    """The ErrorReport of an exception. `path`: the request's. An exception whose message is not for users is logged
    with an incident number, and the client gets only that number."""
    code, status = status_of(error)
    if isinstance(error, UnicodeEncodeError):  # JSON can escape what UTF-8 cannot encode
        return ErrorReport(400, GrpcCode.INVALID_ARGUMENT, LONE_SURROGATE, None, error)
    if not isinstance(error, CoatcheckError) or code == GrpcCode.INTERNAL:
        incident = uuid.uuid4().hex[:12]
        _log.error("incident %s", incident, exc_info=error)
        return ErrorReport(500, code, f"internal error; the router's log has it as incident {incident}", None, error)
    param = None
    if isinstance(error, InvalidBody):
        param = error.field
    elif isinstance(error, ContextLengthExceeded):
        param = _PROMPT_FIELDS.get(path)
    elif isinstance(error, InvalidParameter):
        param = error.name.partition("[")[0].removesuffix(" entry")
    return ErrorReport(status, code, _clip(str(error)), param and _clip(param), error)


def report_refusal(status: int, message: str) -> ErrorReport:
    """The ErrorReport of a request that is refused with `status`, without an exception."""
    return ErrorReport(status, _CODE_OF_STATUS.get(status, GrpcCode.INVALID_ARGUMENT), _clip(message))


def error_response(report: ErrorReport, path: str = "") -> AsciiJsonResponse:
    """The response in the form of the API that `path` belongs to."""
    wait = report.retry_seconds
    headers = {} if wait is None else {"retry-after": str(max(1, round(wait)))}
    if path.startswith(CONNECT_PATH):
        status = _CONNECT_STATUS.get(report.code, report.status)
        return AsciiJsonResponse(connect_error(report), status, headers=headers)
    make = anthropic_error if path.startswith(ANTHROPIC_PATH) else openai_error
    return AsciiJsonResponse(make(report), report.status, headers=headers)


def openai_error(report: ErrorReport) -> dict[str, Any]:
    """OpenAI's error object."""
    code = next((code for kind, code in _CODES.items() if isinstance(report.error, kind)), None)
    kind = _TYPES.get(report.status, "server_error")
    return {"error": {"message": report.message, "type": kind, "param": report.param, "code": code}}


def anthropic_error(report: ErrorReport) -> dict[str, Any]:
    """Anthropic's error object. A request that exceeds the context is refused in Anthropic's words."""
    kind = _ANTHROPIC_TYPES.get(report.status, "api_error")
    fields: dict[str, Any] = {"type": kind, "message": _anthropic_words(report.error) or report.message}
    if isinstance(report.error, UnsupportedThread):
        # Anthropic's client looks for these details, and then sends the whole conversation.
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": fields}


def connect_error(report: ErrorReport) -> dict[str, Any]:
    """Connect's error object, with the details of gRPC's status in base64 without padding."""
    made: dict[str, Any] = {"code": report.code.name.lower(), "message": report.message}
    if details := _details(report):
        made["details"] = [
            {
                "type": detail.TypeName(),
                "value": base64.b64encode(detail.value).rstrip(b"=").decode(),
            }
            for detail in details
        ]
    return made


def grpc_status(report: ErrorReport) -> Status:
    """google.rpc's status, with RetryInfo if the time is known. The message is cut to _GRPC_BYTES bytes."""
    data = report.message.encode(errors="replace")
    message = data.decode() if len(data) <= _GRPC_BYTES else data[:_GRPC_BYTES].decode(errors="ignore") + "…"
    return Status(code=report.code, message=message, details=_details(report))


def _details(report: ErrorReport) -> list[AnyMessage]:
    if report.retry_seconds is None:
        return []
    delay, packed = Duration(), AnyMessage()
    delay.FromNanoseconds(int(report.retry_seconds * 1e9))
    packed.Pack(RetryInfo(retry_delay=delay))
    return [packed]


def _anthropic_words(error: BaseException | None) -> str | None:
    """Anthropic's words for a request that exceeds the context, which its clients match to shorten the conversation or
    to lower max_tokens. None for another error."""
    counts = error.counts if isinstance(error, ContextLengthExceeded) else None
    if counts is None:
        return None
    prompt, answer, limit = counts
    if not answer:
        return f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, decrease input length or "
        "`max_tokens` and try again"
    )


def _clip(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "…"
