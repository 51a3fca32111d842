"""Errors in the form that OpenAI's clients expect, with their HTTP status."""

import logging
import uuid
from typing import Any, Final

from coatcheck.proto.errors import (
    CoatcheckError,
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    NotFound,
    Overloaded,
    status_of,
)
from coatcheck.router.http.json_response import AsciiJsonResponse

_log = logging.getLogger(__name__)
_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                 404: "not_found_error", 405: "invalid_request_error", 408: "invalid_request_error",
                 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
                 431: "invalid_request_error"}  # fmt: skip
ANTHROPIC_PATH: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final = {**_TYPES, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
# OpenAI's error codes; its clients tell errors apart by them.
_CODES: Final = {NotFound: "model_not_found", ContextLengthExceeded: "context_length_exceeded"}
LONE_SURROGATE: Final = "a text has a lone surrogate, which is not a character; remove it"
# A message may quote input of any length.
_MESSAGE_CHARACTERS: Final = 1000


class InvalidBody(InvalidRequest):
    """A body that its endpoint's schema refuses. `field`: the wrong field, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message, field)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class UnsupportedThread(InvalidRequest):
    """Anthropic's field `thread`, by which a server would keep the conversation. Its client has a way without."""

    def __init__(self) -> None:
        super().__init__("Unsupported parameter 'thread'; remove it, and send the whole conversation")


def error_body(error: BaseException, prompt_field: str | None = None) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body for an exception. `prompt_field`: the request's field that holds the prompt, if any. An
    exception that is not a CoatcheckError is logged with an incident number, and the client gets only that number."""
    _, status = status_of(error)
    if isinstance(error, InvalidBody):
        return status, openai_error(status, error.message, param=error.field)
    if isinstance(error, CoatcheckError):
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
        param = prompt_field if isinstance(error, ContextLengthExceeded) else None
        if isinstance(error, InvalidParameter):
            param = error.name.partition("[")[0].removesuffix(" entry")
        return status, openai_error(status, str(error), param=param, code=code)
    if isinstance(error, UnicodeEncodeError):  # JSON can escape what UTF-8 cannot encode
        return 400, openai_error(400, LONE_SURROGATE)
    incident = uuid.uuid4().hex[:12]
    _log.error("incident %s", incident, exc_info=error)
    return 500, openai_error(500, f"internal error; the router's log has it as incident {incident}")


def error_response(status: int, message: str, path: str = "") -> AsciiJsonResponse:
    """The response in the form of the API that `path` belongs to."""
    return AsciiJsonResponse(in_form_of(path, status, openai_error(status, message)), status)


def in_form_of(path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error's body in the form of the API that `path` belongs to. `body`: in OpenAI's form."""
    return anthropic_error(status, body["error"]["message"]) if path.startswith(ANTHROPIC_PATH) else body


def anthropic_details(error: BaseException) -> dict[str, Any] | None:
    """What Anthropic's client looks for in an error to send the whole conversation instead. None for other errors."""
    if not isinstance(error, UnsupportedThread):
        return None
    return {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def anthropic_message(error: BaseException) -> str | None:
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


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object."""
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}}


def openai_error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; a long message or parameter is cut."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": _clip(message), "type": kind, "param": param and _clip(param), "code": code}}


def retry_headers(error: BaseException) -> dict[str, str]:
    """The header retry-after for an Overloaded error, nothing for others."""
    return {"retry-after": str(max(1, round(error.retry_seconds)))} if isinstance(error, Overloaded) else {}


def _clip(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "…"
