"""apply_policy(): the group that `serve --routing` chooses for a request.

    prefix-aware   the group with the least cost in seconds (choose_group), and copies of popular prefixes
    least-loaded   the group with the fewest running and waiting sequences; ties at random
    round-robin    each group in turn, in the order of their names

The last two do not ask what a group holds. They are baselines: what they lose on an operator's own load is what
prefix-aware routing gains. All three choose among the same groups: those that can run the request, and of these the
ones with room while any has room. Pure.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from coatcheck.router.routing.routing_cost import PREFIX_AWARE, Candidate, Decision


def apply_policy(
    policy: str, decision: Decision, candidates: Sequence[Candidate], last_group: str, rng: random.Random
) -> Decision:
    """The decision of `policy`: `decision`, which choose_group has made among `candidates`, or one with the same costs
    and another group. `last_group`: where the last request was sent; "" for none."""
    if policy == PREFIX_AWARE:
        return decision
    allowed = [candidate for candidate in candidates if candidate.has_room] or candidates
    group = _least_loaded(allowed, rng) if policy == "least-loaded" else _next_in_turn(allowed, last_group, rng)
    return replace(decision, group=group, policy=policy)


def _least_loaded(candidates: Sequence[Candidate], rng: random.Random) -> str:
    least = min(candidate.streams for candidate in candidates)
    return rng.choice([candidate.group for candidate in candidates if candidate.streams == least])


def _next_in_turn(candidates: Sequence[Candidate], last_group: str, rng: random.Random) -> str:
    names = [candidate.group for candidate in candidates]
    if not last_group:  # at random, so that routers that start together do not send to one group after the other
        return rng.choice(names)
    return min([name for name in names if name > last_group], default=min(names))
