"""Groups as candidates for choose_group: a plain one, and any that hypothesis draws."""

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from coatcheck.router.routing import routing_cost
from coatcheck.router.routing.routing_cost import Candidate, Candidates, Decision

TOKENS = st.integers(0, 100_000)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        group=st.text("abcdef", min_size=1, max_size=3),
        queued_prefill_tokens=TOKENS,
        prefill_tokens_per_second=st.sampled_from([0.0, 100.0, 10_000.0]),
        restore_tokens_per_second=st.sampled_from([0.0, 1_000_000.0]),
        step_seconds=st.floats(0, 1),
        max_batch_tokens=st.sampled_from([0, 512, 2048]),
        busy_share=st.floats(0, 1),
        free_tokens=TOKENS,
        evictable_tokens=TOKENS,
        device_tokens=TOKENS,
        host_tokens=TOKENS,
        expected_tokens=TOKENS,
        streams=st.integers(0, 300),
        has_room=st.booleans(),
        unseen_requests=st.just(0.0),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.group,
)


def a_group(name: str, **known: float) -> Candidate:
    """A group that computes 1,000 tokens a second and has room, unless `known` says otherwise."""
    return Candidate(name, **{"prefill_tokens_per_second": 1000.0, "free_tokens": 100_000, **known})  # type: ignore[arg-type]


def choose_group(candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random, **context: Any) -> Decision:
    """As routing_cost.choose_group, for candidates one by one."""
    return routing_cost.choose_group(Candidates.of(candidates), prompt_tokens, rng, **context)
