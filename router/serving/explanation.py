"""explanation_of(): a routing decision as a message, and as trailing metadata of a call that asks for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.routing.routing_cost import Decision, GroupCost

EXPLAIN_KEY: Final = "coatcheck-explain"
EXPLANATION_KEY: Final = "coatcheck-explanation-bin"
# Max groups in the metadata. A group takes 62 bytes; gRPC refuses more than 8 KiB of metadata.
_MAX_IN_METADATA: Final = 32
_NO_ROOM: Final = "no room: enough prompt tokens are queued there"
_WAITS: Final = "; no group has room now: the request would wait in the router"


@dataclass(frozen=True)
class DryRun:
    """What Dispatcher.explain returns. `decision`: among the groups that are not full, or among all if all are full.
    `full`: the cost of each full group, and why it is full. `waits`: no group has room, so the request would wait."""

    decision: Decision
    full: Sequence[tuple[GroupCost, str]] = ()
    waits: bool = False

    def to_message(self) -> pb.Explanation:
        """The decision as explanation_of() gives it, and the full groups as refused."""
        message = explanation_of(self.decision)
        reasons = {cost.group: reason for cost, reason in self.full}
        for cost in message.costs:  # there are full groups among them only if all are full
            cost.refused = reasons.pop(cost.group, cost.refused)
        rows = sorted((row for row in self.full if row[0].group in reasons), key=lambda row: row[0].total_seconds)
        message.costs.extend(_to_message(cost, reason) for cost, reason in rows)
        if self.waits:
            message.why += _WAITS
        return message


def explanation_of(decision: Decision, max_groups: int | None = None) -> pb.Explanation:
    """The chosen group and its costs, then the other candidates from the cheapest, then the groups without room that
    the decision has excluded; at most `max_groups`, None for all."""
    rows = zip(decision.costs, decision.excluded.tolist(), strict=True)
    refusals = [(cost, _NO_ROOM if excluded else "") for cost, excluded in rows]
    refusals.sort(key=lambda row: (row[0].group != decision.group, bool(row[1]), row[0].total_seconds))
    return pb.Explanation(
        group=decision.group,
        why=decision.why,
        prompt_tokens=decision.prompt_tokens,
        routing=decision.policy,
        costs=[_to_message(cost, refused) for cost, refused in refusals[:max_groups]],
    )


def _to_message(cost: GroupCost, refused: str) -> pb.GroupCost:
    return pb.GroupCost(refused=refused, **{name: getattr(cost, name) for name in _COST_FIELDS})


# The NamedTuple has fields of the same names.
_COST_FIELDS: Final = [name for name in pb.GroupCost.DESCRIPTOR.fields_by_name if name != "refused"]


def wants_explanation(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's metadata asks for an explanation."""
    return any(key == EXPLAIN_KEY and value in ("1", "true") for key, value in metadata or ())


def trailing_metadata(decision: Decision) -> grpc.aio.Metadata:
    """The trailing metadata of a call that asked for an explanation."""
    return grpc.aio.Metadata((EXPLANATION_KEY, explanation_of(decision, _MAX_IN_METADATA).SerializeToString()))
