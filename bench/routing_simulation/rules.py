"""Published routing rules of other projects, with which our router is compared.

Each rule gets more than its original: the exact prefix index, and every group's load without delay.
"""

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from coatcheck.bench.routing_simulation.service_model import BLOCK, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup

Groups = Sequence[SimulatedGroup]
Matched = Mapping[str, int]  # group -> blocks of the prompt that it holds
Rule = Callable[[SimulatedRequest, Groups, Matched, float, random.Random], SimulatedGroup]
_RING = 64  # points of each group on the ring
_HASHED = 2  # first blocks that are hashed: the first alone is shared by a whole trace


def _least(groups: Groups, cost: Callable[[SimulatedGroup], float], rng: random.Random) -> SimulatedGroup:
    costs = [cost(group) for group in groups]
    least = min(costs)
    return rng.choice([group for group, value in zip(groups, costs, strict=True) if value == least])


def _blocks(matched: Matched, group: SimulatedGroup) -> int:
    return matched.get(group.name, 0)


def at_random(
    job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random
) -> SimulatedGroup:
    return rng.choice(groups)


def round_robin() -> Rule:
    turn = -1

    def rule(job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random) -> SimulatedGroup:
        nonlocal turn
        turn += 1
        return groups[turn % len(groups)]

    return rule


def least_loaded(
    job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random
) -> SimulatedGroup:
    """Fewest requests, running or waiting."""
    return _least(groups, lambda group: group.outstanding, rng)


def consistent_hash() -> Rule:
    """The group whose point follows the hash of the prompt's first blocks on a ring."""
    ring: list[tuple[int, SimulatedGroup]] = []

    def rule(job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random) -> SimulatedGroup:
        if not ring:
            ring.extend((_place(f"{group.name}/{spot}"), group) for group in groups for spot in range(_RING))
            ring.sort(key=lambda entry: entry[0])
        key = _place(str(job.chain[:_HASHED] or rng.random()))
        return ring[bisect(ring, key, key=lambda entry: entry[0]) % len(ring)][1]

    return rule


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def longest_match(
    job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random
) -> SimulatedGroup:
    """The longest cached prefix; among equals the least loaded."""
    return _least(groups, lambda group: -_blocks(matched, group) * 1e6 + group.outstanding, rng)


def dynamo(job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random) -> SimulatedGroup:
    """Fewest blocks of prefill left, this prompt's uncached ones too, plus blocks that are being decoded."""

    def cost(group: SimulatedGroup) -> float:
        left = group.queued_now(now) + job.prompt - _blocks(matched, group) * BLOCK
        return left / BLOCK + group.tiers.in_use

    return _least(groups, cost, rng)


def sglang(job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random) -> SimulatedGroup:
    """Least loaded when most and least are more than 64 and 1.5 times apart, else the longest match if it is long."""
    loads = [group.outstanding for group in groups]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return least_loaded(job, groups, matched, now, rng)
    best = max((_blocks(matched, group) for group in groups), default=0)
    if best * BLOCK > 0.3 * job.prompt:
        return longest_match(job, groups, matched, now, rng)
    return _least(groups, lambda group: group.tiers.allocated, rng)  # the smallest tree


def llm_d(job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random) -> SimulatedGroup:
    """Highest of 2 × share of the prompt cached + share of KV memory unused + how short the queue is."""
    queues = [len(group.queue) for group in groups]
    most, span = max(queues), max(queues) - min(queues)

    def score(group: SimulatedGroup) -> float:
        prefix = _blocks(matched, group) / len(job.chain) if job.chain else 0.0
        unused = 1 - group.tiers.in_use / group.model.blocks
        return 2 * prefix + unused + ((most - len(group.queue)) / span if span else 1.0)

    return _least(groups, lambda group: -score(group), rng)


def ray_serve(
    job: SimulatedRequest, groups: Groups, matched: Matched, now: float, rng: random.Random
) -> SimulatedGroup:
    """The better of two at random unless loads are within 10 of each other: then the longest match if it is long."""
    loads = [group.outstanding for group in groups]
    if max(loads) - min(loads) < 10:
        best = max((_blocks(matched, group) for group in groups), default=0)
        if best * BLOCK >= 0.1 * job.prompt:
            return longest_match(job, groups, matched, now, rng)
        return _least(groups, lambda group: group.tiers.allocated, rng)
    return _least(rng.sample(groups, 2), lambda group: group.outstanding, rng)


def rules() -> dict[str, Rule]:
    """Every rule by name, fresh."""
    return {
        "random": at_random,
        "round robin": round_robin(),
        "least loaded": least_loaded,
        "consistent hash": consistent_hash(),
        "longest match": longest_match,
        "dynamo": dynamo,
        "sglang": sglang,
        "llm-d": llm_d,
        "ray serve": ray_serve,
    }
