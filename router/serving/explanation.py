"""explanation_of(): a routing decision as a message, and as trailing metadata of a call that asks for it."""

from collections.abc import Iterable
from typing import Final

import grpc

from coatcheck.proto.stubs.coatcheck_pb2 import Explanation, GroupCost
from coatcheck.router.routing.routing_cost import CostTerms, Decision

ASKED_BY: Final = "coatcheck-explain"
ANSWERED_BY: Final = "coatcheck-explanation-bin"
# Max groups in the metadata. A group takes 62 bytes; gRPC refuses more than 8 KiB of metadata.
_MAX_IN_METADATA: Final = 32


def explanation_of(decision: Decision, max_groups: int | None = None) -> Explanation:
    """The chosen group and its costs, then the others from the cheapest; at most `max_groups`, None for all."""
    rows = sorted(decision.terms, key=lambda terms: (terms.group != decision.group, terms.total))
    return Explanation(
        group=decision.group,
        why=decision.why,
        prompt_tokens=decision.prompt_tokens,
        costs=[_cost(terms) for terms in rows[:max_groups]],
    )


def is_asked(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a call's metadata asks for an explanation."""
    return any(key == ASKED_BY and value in ("1", "true") for key, value in metadata or ())


def trailing_metadata(decision: Decision) -> grpc.aio.Metadata:
    """The trailing metadata of a call that asked for an explanation."""
    return grpc.aio.Metadata((ANSWERED_BY, explanation_of(decision, _MAX_IN_METADATA).SerializeToString()))


def _cost(terms: CostTerms) -> GroupCost:
    return GroupCost(
        group=terms.group,
        total_seconds=terms.total,
        queue_seconds=terms.queue,
        prefill_seconds=terms.prefill,
        restore_seconds=terms.restore,
        decode_seconds=terms.decode,
        eviction_seconds=terms.eviction,
        delay_seconds=terms.delay,
        device_tokens=terms.device_tokens,
        host_tokens=terms.host_tokens,
        expected_tokens=terms.expected_tokens,
        stall_seconds=terms.stall,
        has_room=terms.has_room,
    )
