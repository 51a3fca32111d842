"""The bounds and the defaults of a request's retention."""

import math

import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.retention import DEFAULT_TTL_SECONDS, Retention
from coatcheck.proto.stubs.coatcheck_pb2 import Retention as RetentionMessage


@pytest.mark.parametrize(
    ("priority", "ttl", "named"),
    [
        (101, 1.0, "retention.priority"),
        (-1, 1.0, "retention.priority"),
        (5, 0.0, "retention.ttl_seconds"),
        (5, -1.0, "retention.ttl_seconds"),
        (5, 86401.0, "retention.ttl_seconds"),
        (5, math.nan, "retention.ttl_seconds"),
        (5, math.inf, "retention.ttl_seconds"),
    ],
)
def test_what_cannot_be_is_refused(priority: int, ttl: float, named: str) -> None:
    """The error for a value out of bounds names the field and the allowed values."""
    with pytest.raises(InvalidRequest, match=named):
        Retention(priority, ttl)


def test_a_priority_is_required() -> None:
    """A retention without a priority is refused."""
    with pytest.raises(InvalidRequest, match="give one, 0 to 100"):
        Retention.from_message(RetentionMessage(ttl_seconds=5))


def test_the_message_comes_back() -> None:
    """The wire form has all defaults filled in, keeps priority 0, and gives an equal Retention."""
    assert Retention.from_message(RetentionMessage(priority=0)) == Retention(0, DEFAULT_TTL_SECONDS)
    kept = Retention(70, 12.5)
    assert Retention.from_message(kept.to_message()) == kept
