"""Eligibility: which groups can take a request at all; their cost is the policy's matter. Pure."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from coatcheck.proto.errors import ContextLengthExceeded, DeadlineExceeded
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.request import Request
from coatcheck.router.routing.routing_cost import Decision


class EligibleGroups(NamedTuple):
    """The names of the groups that can take a request; the admission queue's scheduling class of the request.

    If the first of several requests with equal values finds no room, the others find none either, so the queue tries
    only the first. `has_begun`: the request was running on a group that was lost. Such a request waits until an equal
    group serves; one that has not begun is refused if no group can ever hold it.
    """

    names: frozenset[str]
    has_begun: bool = False

    @classmethod
    def of(cls, groups: Iterable[tuple[GroupConnection, Registration]], *, has_begun: bool = False) -> Self:
        """The value for a request that every one of `groups` can take."""
        return cls(frozenset(link.name for link, _ in groups), has_begun)


def require_time(request: Request, decision: Decision, now: float) -> None:
    """Raises DeadlineExceeded if no group can begin to answer in time. The least time is the number of steps for the
    prompts ahead and for its own, each as quick as a decode step."""
    if request.deadline is None:
        return
    soonest = min(term.decode for term in decision.terms)
    if now + soonest > request.deadline:
        raise DeadlineExceeded(
            f"the first token would take {soonest:.1f} s at the least, and its deadline is in "
            f"{max(request.deadline - now, 0.0):.1f} s; allow more time"
        )


def capacity(registration: Registration) -> int:
    """Most tokens that one sequence can come to on a group."""
    model = registration.model
    return min(model.max_model_len, registration.num_blocks * model.block_size)


def able_to_hold(
    serving: list[tuple[GroupConnection, Registration]], request: Request
) -> list[tuple[GroupConnection, Registration]]:
    """The groups of `serving` that can hold the request; raises ContextLengthExceeded if none can."""
    able = [(link, registration) for link, registration in serving if holds(registration, request)]
    if not able:
        most = max(capacity(registration) for _, registration in serving)
        raise ContextLengthExceeded.of(
            most,
            f"you requested {request.max_len} tokens, prompt and max_tokens together: shorten the prompt or lower "
            "max_tokens",
        )
    return able


def holds(registration: Registration, request: Request) -> bool:
    """Whether a group can hold it, all else being gone."""
    return request.max_len <= capacity(registration)


def kind(model: GetModelResponse) -> tuple[str, str, str, str, int]:
    """What groups must have in common that compute the same tokens."""
    return model.name, model.fingerprint, model.dtype, model.kv_dtype, model.block_size


def equal(one: GetModelResponse, other: GetModelResponse) -> bool:
    """Whether a stream may move from one group to another: both then compute the same tokens."""
    return kind(one) == kind(other)
