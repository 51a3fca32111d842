"""The errors of all folders, and the table of their gRPC and HTTP statuses.

A message says what is wrong and what to change.
"""

import asyncio
from enum import IntEnum
from typing import Final, Self


class CoatcheckError(Exception):
    """Base class of errors whose message is for the user."""


class InvalidRequest(CoatcheckError):
    """The request is malformed."""


class InvalidParameter(InvalidRequest):
    """A parameter has a value that is not allowed. `name`: the parameter. `reason`: the message without the name."""

    def __init__(self, name: str, reason: str = "is not allowed") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


class NeverFits(InvalidRequest):
    """The request is well formed but larger than this server can ever serve."""


class ContextLengthExceeded(NeverFits):
    """Prompt and answer together exceed the context. The code in HTTP errors is "context_length_exceeded".

    `counts`: (tokens of the prompt, of the answer or 0, of the context), if they are known.
    """

    counts: tuple[int, int, int] | None = None

    @classmethod
    def for_limit(cls, limit: int, explanation: str, prompt: int | None = None, answer: int = 0) -> Self:
        """`limit`: max tokens of a sequence. `explanation`: the tokens of the prompt, and what to change. `prompt` and
        `answer`: the tokens of each, if they are known.

        OpenAI's clients match the first words, shorten the conversation and try again.
        """
        error = cls(f"This model's maximum context length is {limit} tokens; {explanation}")
        error.counts = None if prompt is None else (prompt, answer, limit)
        return error


class Unauthenticated(CoatcheckError):
    """The key is missing or unknown. The message never repeats the key."""


class PermissionDenied(CoatcheckError):
    """The tenant's role does not allow this."""


class NotFound(CoatcheckError):
    """The named model or group does not exist."""


class Overloaded(CoatcheckError):
    """There is no room now. `retry_seconds`: the estimated time until there is. `reason`: a label for counters."""

    def __init__(self, message: str, retry_seconds: float = 1.0, reason: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.reason = reason


class SlowReader(CoatcheckError):
    """The stream was ended because the client did not read it."""


class DeadlineExceeded(CoatcheckError):
    """The deadline has passed or cannot be met. Nothing was computed."""


class Unavailable(CoatcheckError):
    """No group can serve the request now."""


class Draining(Unavailable):
    """The server accepts no new work."""


class Poisoned(CoatcheckError):
    """The request ran on several groups when they crashed. It is not sent to another group."""


class InvalidModel(CoatcheckError):
    """The checkpoint cannot be served."""


class InvalidConfig(CoatcheckError):
    """A setting is invalid."""


class GrpcCode(IntEnum):
    """The values of google.rpc.Code that errors map to. Workers use them without importing grpc."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


# The gRPC code and HTTP status of each class. A subclass without an entry uses its base class's.
STATUS: Final[dict[type[CoatcheckError], tuple[GrpcCode, int]]] = {
    InvalidRequest: (GrpcCode.INVALID_ARGUMENT, 400),
    Unauthenticated: (GrpcCode.UNAUTHENTICATED, 401),
    PermissionDenied: (GrpcCode.PERMISSION_DENIED, 403),
    NotFound: (GrpcCode.NOT_FOUND, 404),
    Overloaded: (GrpcCode.RESOURCE_EXHAUSTED, 429),
    SlowReader: (GrpcCode.RESOURCE_EXHAUSTED, 429),
    DeadlineExceeded: (GrpcCode.DEADLINE_EXCEEDED, 504),
    Unavailable: (GrpcCode.UNAVAILABLE, 503),
    Poisoned: (GrpcCode.ABORTED, 500),
    InvalidModel: (GrpcCode.FAILED_PRECONDITION, 500),
    InvalidConfig: (GrpcCode.FAILED_PRECONDITION, 500),
}


def status_name(error: BaseException) -> str:
    """The name of an error's gRPC code in lower case. "cancelled" for a cancelled task or an abandoned stream."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return status_of(error)[0].name.lower()


def status_of(error: BaseException) -> tuple[GrpcCode, int]:
    """(gRPC code, HTTP status) of an error. Any other exception is INTERNAL, 500."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return GrpcCode.INTERNAL, 500


def error_of(code: int, message: str) -> CoatcheckError:
    """The error for a received google.rpc code: the first class in STATUS with this code, else CoatcheckError."""
    for kind, (grpc_code, _) in STATUS.items():
        if grpc_code == code:
            return kind(message)
    return CoatcheckError(message)
