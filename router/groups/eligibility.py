"""Eligibility: which groups can run a request at all. Routing costs choose among these groups. Pure."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from coatcheck.proto.errors import ContextLengthExceeded, DeadlineExceeded
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.request import Request
from coatcheck.router.routing.routing_cost import Decision


class EligibleGroups(NamedTuple):
    """The names of the groups that can run a request: the request's scheduling class in the admission queue.

    If the first of several requests of one class finds no room, the others find none either, so the queue tries only
    the first. `has_begun`: the request was running on a group that was lost. Such a request waits until a compatible
    group serves. A request that has not begun is refused if no serving group can hold it.
    """

    names: frozenset[str]
    has_begun: bool = False

    @classmethod
    def of(cls, groups: Iterable[GroupConnection], *, has_begun: bool = False) -> Self:
        """The class of a request that all of `groups` can run."""
        return cls(frozenset(group.name for group in groups), has_begun)


def require_deadline(request: Request, decision: Decision, now: float) -> None:
    """Raises DeadlineExceeded if no group can send the first token in time. The time is a lower bound: the steps that
    compute the queued prompts and this one, each as fast as a decode step."""
    if request.deadline is None:
        return
    soonest = min(cost.decode_seconds for cost in decision.costs)
    if now + soonest > request.deadline:
        raise DeadlineExceeded(
            f"the first token would take {soonest:.1f} s at the least, and its deadline is in "
            f"{max(request.deadline - now, 0.0):.1f} s; allow more time"
        )


def max_sequence_tokens(group: GroupConnection) -> int:
    """Max tokens of one sequence on a group: the model's context, or the KV pool if that is smaller."""
    return min(group.model.max_model_len, group.registration.num_blocks * group.model.block_size)


def groups_that_can_hold(serving: list[GroupConnection], request: Request) -> list[GroupConnection]:
    """The groups of `serving`, at least one, that can hold the request. Raises ContextLengthExceeded if none can."""
    eligible = [group for group in serving if can_hold(group, request)]
    if not eligible:
        most = max(max_sequence_tokens(group) for group in serving)
        raise ContextLengthExceeded.for_limit(
            most,
            f"prompt and max_tokens together are {request.max_len}. Shorten the prompt or lower max_tokens",
        )
    return eligible


def can_hold(group: GroupConnection, request: Request) -> bool:
    """Whether the group, if it were empty, could hold the request."""
    return request.max_len <= max_sequence_tokens(group)


def compatibility_key(model: GetModelResponse) -> tuple[str, str, str, str, int]:
    """A key that is equal for groups between which a stream may move. Up to rounding they compute the same logits; with
    --deterministic, the same tp and the same kind of machine the logits are equal bit for bit."""
    return model.name, model.fingerprint, model.dtype, model.kv_dtype, model.block_size


def are_compatible(one: GetModelResponse, other: GetModelResponse) -> bool:
    """Whether a stream may move from one group to the other."""
    return compatibility_key(one) == compatibility_key(other)
