"""Eligibility: which groups can run a request at all. Routing costs choose among these groups.

Whenever the set of groups that take requests changes, a new ServingGroups is made. Until the next change, requests that
the same groups can run share one EligibleGroups object. So a routing decision builds no list of groups.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Self

import numpy as np

from coatcheck.proto.errors import ContextLengthExceeded, DeadlineExceeded
from coatcheck.router.groups.group_connection import GroupConnection, adapters_key
from coatcheck.router.groups.request import Request
from coatcheck.router.routing.routing_cost import BoolArray, Decision, IndexArray


class EligibleGroups:
    """The groups that can run a request: the request's scheduling class in the admission queue.

    If the first of several requests of one class finds no room, the others find none either, so the queue tries only
    the first. `names` and `slots` (see LoadTable) are arrays in the order of `groups`. `models`: for each set of groups
    with the same block hashes, one of their models and the indices of these groups.
    """

    def __init__(self, groups: Sequence[GroupConnection]) -> None:
        self.groups = groups
        self.names = np.array([group.name for group in groups], object)
        self.slots: IndexArray = np.array([group.load.slot for group in groups], np.intp)
        indices: dict[Hashable, list[int]] = {}
        for index, group in enumerate(groups):
            model = group.model
            indices.setdefault((model.name, model.fingerprint, adapters_key(model), model.block_size), []).append(index)
        self.models = [(groups[alike[0]].model, np.array(alike, np.intp)) for alike in indices.values()]

    def __len__(self) -> int:
        return len(self.groups)

    def only(self, keep: BoolArray) -> Self:
        """The groups for which `keep` is true."""
        return type(self)([self.groups[index] for index in np.flatnonzero(keep).tolist()])


class ServingGroups:
    """The groups that take new requests, at one moment. Everything else is computed when the first request needs it, so
    a ServingGroups that no request uses costs little: a router makes one for each group that attaches."""

    def __init__(self, groups: Sequence[GroupConnection] = ()) -> None:
        self.groups = groups
        self._eligible: dict[Hashable, EligibleGroups] = {}

    @property
    def max_sequence_tokens(self) -> int:
        """Max tokens of one sequence on any group; 0 without groups."""
        return self._distinct_limits[-1] if self._distinct_limits else 0

    @cached_property
    def _limits(self) -> list[int]:
        return [max_sequence_tokens(group) for group in self.groups]

    @cached_property
    def _distinct_limits(self) -> list[int]:
        return sorted(set(self._limits))

    def eligible(self, max_len: int = 0, only_kind: bytes = b"") -> EligibleGroups:
        """The groups that could hold `max_len` tokens if they were empty. `only_kind`: only groups of this group_kind;
        b"" for any. Requests with the same groups get the same object."""
        key = bisect_left(self._distinct_limits, max_len), only_kind
        if key not in self._eligible:
            self._eligible[key] = EligibleGroups(
                [
                    group
                    for group, limit in zip(self.groups, self._limits, strict=True)
                    if limit >= max_len and (not only_kind or group.group_kind == only_kind)
                ]
            )
        return self._eligible[key]

    def require_eligible(self, request: Request) -> EligibleGroups:
        """The groups that can hold a new request. Raises ContextLengthExceeded if there are groups and none can."""
        eligible = self.eligible(request.max_len)
        if self.groups and not len(eligible):
            raise ContextLengthExceeded.for_limit(
                self.max_sequence_tokens,
                f"prompt and max_tokens together are {request.max_len}. Shorten the prompt or lower max_tokens",
            )
        return eligible


def require_deadline(request: Request, decision: Decision, now: float) -> None:
    """Raises DeadlineExceeded if no group can send the first token in time. The time is a lower bound: the steps that
    compute the queued prompts and this one, each as fast as a decode step."""
    if request.deadline is None:
        return
    soonest = float(decision.table.decode_seconds.min())
    if now + soonest > request.deadline:
        raise DeadlineExceeded(
            f"the first token would take at least {soonest:.1f} s, and the request's deadline is in "
            f"{max(request.deadline - now, 0.0):.1f} s; allow more time"
        )


def max_sequence_tokens(group: GroupConnection) -> int:
    """Max tokens of one sequence on a group: the model's context, or the KV pool if that is smaller."""
    return min(group.model.max_model_len, group.registration.num_blocks * group.model.block_size)
