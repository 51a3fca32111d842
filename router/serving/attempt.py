"""Attempt: a request as it is sent to its next group, and the limits on which group that may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.router.groups.request import Request
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle


@dataclass(frozen=True, slots=True)
class Attempt:
    """`number`: how many groups had the request before. `delivered`: the output tokens that the client has, by choice.

    `only_compatible_with`: the model of the group that had the request before; only groups that compute the same tokens
    can continue it. None if no group had the request. `suspicion`: see PoisonSuspicion.level.
    """

    request: Request
    number: int = 0
    delivered: Mapping[int, Sequence[int]] = field(default_factory=dict)
    only_compatible_with: GetModelResponse | None = None
    suspicion: int = 0
    lifecycle: RequestLifecycle | None = None

    @property
    def delivered_tokens(self) -> int:
        """Output tokens that the client has, over all choices."""
        return sum(map(len, self.delivered.values()))
