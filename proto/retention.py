"""Retention: how long and how dearly a request wants its prefix kept, checked; the same in routers and workers.

It does not know what is kept, nor how much of it may be.
"""

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
    """`priority` 0: the prefix goes before all others; above 0 it stays as long as there are others to go, the higher
    the longer, for `ttl_seconds`."""

    priority: int
    ttl_seconds: float = DEFAULT_TTL_SECONDS

    def __post_init__(self) -> None:
        """Raises InvalidRequest for what cannot be."""
        if not 0 <= self.priority <= 100:
            raise InvalidRequest(f"retention.priority is {self.priority}; use 0 to 100")
        if not (math.isfinite(self.ttl_seconds) and 0 < self.ttl_seconds <= MAX_TTL_SECONDS):
            raise InvalidRequest(
                f"retention.ttl_seconds is {self.ttl_seconds:g}; use more than 0 and at most {MAX_TTL_SECONDS:g}"
            )

    @classmethod
    def from_message(cls, message: RetentionMessage) -> Self:
        """Checked, with its defaults filled in."""
        if not message.HasField("priority"):
            raise InvalidRequest("retention has no priority; give one, 0 to 100")
        ttl = message.ttl_seconds if message.HasField("ttl_seconds") else DEFAULT_TTL_SECONDS
        return cls(message.priority, ttl)

    def to_message(self) -> RetentionMessage:
        """The wire form, nothing left to defaults."""
        from coatcheck.proto.stubs.coatcheck_pb2 import Retention as RetentionMessage  # late, as in grammar.py

        return RetentionMessage(priority=self.priority, ttl_seconds=self.ttl_seconds)
