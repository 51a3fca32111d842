"""explanation_of(): a routing decision as a message, and as trailing metadata of a call that asks for it."""

from collections.abc import Iterable
from typing import Final

import grpc

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.routing.routing_cost import Decision

EXPLAIN_KEY: Final = "coatcheck-explain"
EXPLANATION_KEY: Final = "coatcheck-explanation-bin"
# Max groups in the metadata. A group takes 62 bytes; gRPC refuses more than 8 KiB of metadata.
_MAX_IN_METADATA: Final = 32


def explanation_of(decision: Decision, max_groups: int | None = None) -> pb.Explanation:
    """The chosen group and its costs, then the others from the cheapest; at most `max_groups`, None for all."""
    costs = sorted(decision.costs, key=lambda cost: (cost.group != decision.group, cost.total_seconds))
    fields = pb.GroupCost.DESCRIPTOR.fields_by_name  # the NamedTuple has fields of the same names
    return pb.Explanation(
        group=decision.group,
        why=decision.why,
        prompt_tokens=decision.prompt_tokens,
        routing=decision.policy,
        costs=[pb.GroupCost(**{name: getattr(cost, name) for name in fields}) for cost in costs[:max_groups]],
    )


def wants_explanation(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's metadata asks for an explanation."""
    return any(key == EXPLAIN_KEY and value in ("1", "true") for key, value in metadata or ())


def trailing_metadata(decision: Decision) -> grpc.aio.Metadata:
    """The trailing metadata of a call that asked for an explanation."""
    return grpc.aio.Metadata((EXPLANATION_KEY, explanation_of(decision, _MAX_IN_METADATA).SerializeToString()))
