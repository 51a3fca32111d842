"""Retention: the priority with which the cache keeps a request's prefix, and for how long; validated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from coatcheck.proto.errors import InvalidRequest

if TYPE_CHECKING:
    from coatcheck.proto.stubs.coatcheck_pb2 import Retention as RetentionMessage

DEFAULT_TTL_SECONDS: Final = 300.0
MAX_TTL_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """`priority` 0: the prefix is evicted first. Above 0: after prefixes of lower priority, for `ttl_seconds`."""

    priority: int
    ttl_seconds: float = DEFAULT_TTL_SECONDS

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a value outside its range."""
        if not 0 <= self.priority <= 100:
            raise InvalidRequest(f"retention.priority is {self.priority}; use 0 to 100")
        if not (math.isfinite(self.ttl_seconds) and 0 < self.ttl_seconds <= MAX_TTL_SECONDS):
            raise InvalidRequest(
                f"retention.ttl_seconds is {self.ttl_seconds:g}; use more than 0 and at most {MAX_TTL_SECONDS:g}"
            )

    @classmethod
    def from_message(cls, message: RetentionMessage) -> Self:
        """From the wire, with defaults filled in. Raises InvalidRequest."""
        if not message.HasField("priority"):
            raise InvalidRequest("retention has no priority; give one, 0 to 100")
        ttl = message.ttl_seconds if message.HasField("ttl_seconds") else DEFAULT_TTL_SECONDS
        return cls(message.priority, ttl)

    def to_message(self) -> RetentionMessage:
        """The wire form, with every field set."""
        from coatcheck.proto.stubs.coatcheck_pb2 import Retention as RetentionMessage  # see grammar.py

        return RetentionMessage(priority=self.priority, ttl_seconds=self.ttl_seconds)
