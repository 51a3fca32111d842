"""The errors of all folders, and the table of their gRPC and HTTP statuses.

    CoatcheckError
    ├── InvalidRequest      the request is malformed               INVALID_ARGUMENT    400
    │   └── NeverFits       well formed, but too large             INVALID_ARGUMENT    400
    │       └── ContextLengthExceeded  longer than the context     INVALID_ARGUMENT    400
    ├── Unauthenticated     no key, or an unknown one              UNAUTHENTICATED     401
    ├── PermissionDenied    the key's role does not allow this     PERMISSION_DENIED   403
    ├── NotFound            no such model or group                 NOT_FOUND           404
    ├── Overloaded          no room now; try again later           RESOURCE_EXHAUSTED  429
    ├── SlowReader          the client reads too slowly            RESOURCE_EXHAUSTED  429
    ├── DeadlineExceeded    the deadline passed or cannot be met   DEADLINE_EXCEEDED   504
    ├── Unavailable         no group serves now                    UNAVAILABLE         503
    │   └── Draining        the server accepts no new work         UNAVAILABLE         503
    ├── Poisoned            the request crashed several groups     ABORTED             500
    ├── InvalidModel        a checkpoint that cannot be served     FAILED_PRECONDITION 500
    └── InvalidConfig       an invalid setting                     FAILED_PRECONDITION 500

A message says what is wrong and what to change.
"""

import asyncio
from typing import Final, Self


class CoatcheckError(Exception):
    """Base class of errors whose message is for the user."""


class InvalidRequest(CoatcheckError):
    """The request is malformed."""


class NeverFits(InvalidRequest):
    """The request is well formed but larger than this server can ever serve."""


class ContextLengthExceeded(NeverFits):
    """Prompt and answer together exceed the context. The code in HTTP errors is "context_length_exceeded"."""

    @classmethod
    def for_limit(cls, limit: int, explanation: str) -> Self:
        """`limit`: max tokens of a sequence. `explanation`: the requested tokens, and what to change.

        OpenAI's clients match the first words, shorten the conversation and try again.
        """
        return cls(f"This model's maximum context length is {limit} tokens. However, {explanation}")


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


# class -> (google.rpc code, HTTP status). A subclass without an entry has its parent's.
STATUS: Final[dict[type[CoatcheckError], tuple[int, int]]] = {
    InvalidRequest: (3, 400),
    Unauthenticated: (16, 401),
    PermissionDenied: (7, 403),
    NotFound: (5, 404),
    Overloaded: (8, 429),
    SlowReader: (8, 429),
    DeadlineExceeded: (4, 504),
    Unavailable: (14, 503),
    Poisoned: (10, 500),
    InvalidModel: (9, 500),
    InvalidConfig: (9, 500),
}

# google.rpc codes as metrics and logs name them.
_NAMES: Final = {
    3: "invalid_argument",
    4: "deadline_exceeded",
    5: "not_found",
    7: "permission_denied",
    8: "resource_exhausted",
    9: "failed_precondition",
    10: "aborted",
    13: "internal",
    14: "unavailable",
    16: "unauthenticated",
}


def status_name(error: BaseException) -> str:
    """The name of an error's gRPC code in lower case. "cancelled" for a cancelled task or an abandoned stream."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    code, _ = status_of(error)
    return _NAMES.get(code, str(code))


def status_of(error: BaseException) -> tuple[int, int]:
    """(google.rpc code, HTTP status) of an error. Any other exception is INTERNAL, 500."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return (13, 500)


def error_of(code: int, message: str) -> CoatcheckError:
    """The error for a google.rpc code that was received."""
    for kind, (grpc_code, _) in STATUS.items():
        if grpc_code == code:
            return kind(message)
    return CoatcheckError(message)
