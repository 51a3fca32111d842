"""Eligibility: which groups could take a request at all, whatever that would cost. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from ..proto.coatcheck_pb2 import GetModelResponse
from ..proto.errors import ContextLengthExceeded, DeadlineExceeded
from ..proto.worker_pb2 import Registration
from .group_link import GroupLink
from .policy import Decision
from .request import Request


class Eligible(NamedTuple):
    """The names of the groups that can take a request.

    While the first of several requests with equal values finds no room, the others find none either, so the router
    tries only the first. `has_begun`: the request was running on a group that was lost. Such a request waits until an
    equal group serves; one that has not begun is refused if no group can ever hold it.
    """

    groups: frozenset[str]
    has_begun: bool = False


def everywhere(serving: Iterable[tuple[GroupLink, Registration]]) -> Eligible:
    """The value of a request that every group of `serving` can take."""
    return Eligible(frozenset(link.name for link, _ in serving))


def require_time(request: Request, decision: Decision, now: float) -> None:
    """Raises DeadlineExceeded where no group could begin to answer in time: as many steps as the prompts ahead and its
    own take at the least, each as quick as one without prompts."""
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
    serving: list[tuple[GroupLink, Registration]], request: Request
) -> list[tuple[GroupLink, Registration]]:
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
