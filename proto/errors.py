"""The errors that cross rooms, and the one table that maps them to gRPC and HTTP status.

    CoatcheckError
    ├── InvalidRequest      the request is wrong as written        INVALID_ARGUMENT    400
    │   └── NeverFits       right, but larger than this server     INVALID_ARGUMENT    400
    │       └── ContextLengthExceeded  more than the context holds INVALID_ARGUMENT    400
    ├── Unauthenticated     no key, or not one of ours             UNAUTHENTICATED     401
    ├── PermissionDenied    a key that may not do this             PERMISSION_DENIED   403
    ├── NotFound            no such model or group                 NOT_FOUND           404
    ├── Overloaded          would fit later; try again             RESOURCE_EXHAUSTED  429
    ├── SlowReader          its client reads too slowly            RESOURCE_EXHAUSTED  429
    ├── DeadlineExceeded    its time is up, or too short       DEADLINE_EXCEEDED   504
    ├── Unavailable         no group serves just now               UNAVAILABLE         503
    ├── Draining            this server takes no new work          UNAVAILABLE         503
    ├── Poisoned            ended several groups; not tried again  ABORTED             500
    ├── InvalidModel        a checkpoint that cannot be served     FAILED_PRECONDITION 500
    └── InvalidConfig       a setting that cannot be               FAILED_PRECONDITION 500

A message says what is wrong and what to change. This module does not know who raises them, nor how a
status is sent.
"""

import asyncio
from typing import Final, Self


class CoatcheckError(Exception):
    """Root of all errors with a message for the person who asked."""


class InvalidRequest(CoatcheckError):
    """The request is wrong as written."""


class NeverFits(InvalidRequest):
    """The request is well formed but larger than this server can ever hold."""


class ContextLengthExceeded(NeverFits):
    """Prompt and answer together have more tokens than one sequence may have. The code of its HTTP error is
    "context_length_exceeded"."""

    @classmethod
    def of(cls, limit: int, however: str) -> Self:
        """`limit`: most tokens of one sequence. `however`: what was asked for, and what to change.

        Clients of OpenAI's API match the first words, shorten the conversation and try again."""
        return cls(f"This model's maximum context length is {limit} tokens. However, {however}")


class Unauthenticated(CoatcheckError):
    """Nobody is known by what came as a key; the message never repeats it."""


class PermissionDenied(CoatcheckError):
    """Whoever asks may not do this."""


class NotFound(CoatcheckError):
    """The named model or group does not exist here."""


class Overloaded(CoatcheckError):
    """There is no room now; `retry_seconds` is an honest guess of when there will be. `reason` is for counters."""

    def __init__(self, message: str, retry_seconds: float = 1.0, reason: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.reason = reason


class SlowReader(CoatcheckError):
    """A stream was ended because nobody took what it brought."""


class DeadlineExceeded(CoatcheckError):
    """The client's deadline has passed, or cannot be met; nothing was computed."""


class Unavailable(CoatcheckError):
    """No group can answer just now."""


class Draining(Unavailable):
    """This server takes no new work."""


class Poisoned(CoatcheckError):
    """The request was running on several groups when they ended; it is not sent to another."""


class InvalidModel(CoatcheckError):
    """A checkpoint that cannot be served, with the reason."""


class InvalidConfig(CoatcheckError):
    """A setting that cannot be, with what to change."""


# name -> (google.rpc code, HTTP status); a subclass without a row takes its parent's.
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

# google.rpc codes that the table has, and what is not ours, as they are counted and logged.
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
    """An error's status in small letters; "cancelled" for a task or stream that whoever wanted it has left."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    code, _ = status_of(error)
    return _NAMES.get(code, str(code))


def status_of(error: BaseException) -> tuple[int, int]:
    """(google.rpc code, HTTP status) of an error; anything that is not ours is INTERNAL, 500."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return (13, 500)


def error_of(code: int, message: str) -> CoatcheckError:
    """The error that a google.rpc code stands for, on the side that receives it."""
    for kind, (grpc_code, _) in STATUS.items():
        if grpc_code == code:
            return kind(message)
    return CoatcheckError(message)
