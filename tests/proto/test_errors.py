"""The gRPC and HTTP status of each error."""

import grpc
import pytest

from coatcheck.proto import errors
from coatcheck.proto.errors import CoatcheckError, Overloaded, error_of, status_of

TABLE = [
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors.InvalidParameter, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors.NeverFits, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors.ContextLengthExceeded, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, 401),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED, 403),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND, 404),
    (errors.Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (errors.SlowReader, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE, 503),
    (errors.Draining, grpc.StatusCode.UNAVAILABLE, 503),
    (errors.Poisoned, grpc.StatusCode.ABORTED, 500),
    (errors.InvalidModel, grpc.StatusCode.FAILED_PRECONDITION, 500),
    (errors.InvalidConfig, grpc.StatusCode.FAILED_PRECONDITION, 500),
]


@pytest.mark.parametrize(("kind", "code", "http"), TABLE)
def test_status_of_each_error(kind: type[CoatcheckError], code: grpc.StatusCode, http: int) -> None:
    """Each error has the gRPC and HTTP status of this table."""
    assert status_of(kind("why")) == (code.value[0], http)


def test_every_error_is_in_this_table() -> None:
    """Every subclass of CoatcheckError has a row in this table."""
    ours = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CoatcheckError)}
    assert ours - {CoatcheckError} == {kind for kind, _, _ in TABLE}


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), CoatcheckError("x")])
def test_anything_else_is_internal(error: Exception) -> None:
    """Any other exception is INTERNAL and 500, so that a bug never looks like a fault of the client."""
    assert status_of(error) == (grpc.StatusCode.INTERNAL.value[0], 500)


@pytest.mark.parametrize(("kind", "code", "http"), TABLE)
def test_error_comes_back_from_its_code(kind: type[CoatcheckError], code: grpc.StatusCode, http: int) -> None:
    """The receiving side gets an error of the same status and the same message."""
    error = error_of(code.value[0], "why")
    assert status_of(error) == (code.value[0], http)
    assert str(error) == "why"


def test_unknown_code_is_still_an_error_of_ours() -> None:
    """A code without an error class becomes a CoatcheckError with the message."""
    error = error_of(grpc.StatusCode.DATA_LOSS.value[0], "why")
    assert type(error) is CoatcheckError
    assert str(error) == "why"


def test_overload_says_when_to_come_back() -> None:
    """Overloaded carries the seconds after which trying again makes sense."""
    assert Overloaded("full", retry_seconds=2.5).retry_seconds == 2.5
    assert Overloaded("full").retry_seconds > 0
