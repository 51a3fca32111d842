"""apply_policy(): the group that `serve --routing` chooses for a request.

    prefix-aware   the group with the least cost in seconds (choose_group), and copies of popular prefixes
    least-loaded   the group with the fewest running and waiting sequences; ties at random
    round-robin    each group in turn, in the order of their names

The last two ignore which blocks a group holds. They are baselines: what they lose on an operator's own load is what
prefix-aware routing gains. They choose among the groups that can run the request and have room, or among all that can
run it if none has room. prefix-aware may also choose a group without room that holds more of the prompt. Pure.
"""

import random
from dataclasses import replace

import numpy as np

from coatcheck.router.routing.routing_cost import PREFIX_AWARE, Candidates, Decision, IndexArray


def apply_policy(
    policy: str, decision: Decision, candidates: Candidates, last_group: str, rng: random.Random
) -> Decision:
    """The decision of `policy`: `decision`, which choose_group has made among `candidates`, or one with the same costs
    and another group. `last_group`: where the last request was sent; "" for none."""
    if policy == PREFIX_AWARE:
        return decision
    allowed = np.flatnonzero(candidates.has_room | ~candidates.has_room.any())
    if policy == "least-loaded":
        index = _least_loaded(candidates, allowed, rng)
    else:
        index = _round_robin(candidates, allowed, last_group, rng)
    return replace(decision, index=index, policy=policy)


def _least_loaded(candidates: Candidates, allowed: IndexArray, rng: random.Random) -> int:
    streams = candidates.streams[allowed]
    return int(rng.choice(allowed[streams == streams.min()]))


def _round_robin(candidates: Candidates, allowed: IndexArray, last_group: str, rng: random.Random) -> int:
    if not last_group:  # at random, so that routers that start together begin with different groups
        return int(rng.choice(allowed))
    names = candidates.groups
    return int(min(allowed, key=lambda index: (names[index] <= last_group, names[index])))
