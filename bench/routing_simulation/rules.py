"""Published routing rules of other projects, with which our router is compared.

Each rule gets more than its original: the exact prefix index, and every group's load without delay.
"""

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from coatcheck.bench.routing_simulation.service_model import BLOCK, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_index import match_prefix

Groups = Sequence[SimulatedGroup]


class CachedPrefix:
    """The blocks of a prompt that each group holds from its start, found when a rule first asks: half of them never do.
    `known`: the blocks by group, where they have been found already."""

    __slots__ = ("_by_group", "_chain", "_groups")

    def __init__(self, chain: Sequence[bytes], groups: Groups, known: Mapping[str, int] | None = None) -> None:
        self._chain = chain
        self._groups = groups
        self._by_group = known

    def blocks(self, group: SimulatedGroup) -> int:
        """Number of blocks that the group holds, in any tier."""
        if self._by_group is None:
            bits = {group.bit: group.name for group in self._groups}
            matches = match_prefix(self._chain, sum(bits), self._groups[0].holders)
            self._by_group = {bits[bit]: match.blocks for bit, match in matches.items()}
        return self._by_group.get(group.name, 0)


Rule = Callable[[SimulatedRequest, Groups, CachedPrefix, float, random.Random], SimulatedGroup]
_RING = 64  # points of each group on the ring
_HASHED = 2  # first blocks that are hashed: the first alone is shared by a whole trace


def _longest_prefix(groups: Groups, prefix: CachedPrefix) -> int:
    """Tokens of the prompt that the group with the longest match holds."""
    return max((prefix.blocks(group) for group in groups), default=0) * BLOCK


def _smallest_tree(groups: Groups, rng: random.Random) -> SimulatedGroup:
    """The group that caches least, as in a radix tree for each group."""
    return _least(groups, lambda group: group.tiers.allocated, rng)


def _least(groups: Groups, cost: Callable[[SimulatedGroup], float], rng: random.Random) -> SimulatedGroup:
    costs = [cost(group) for group in groups]
    least = min(costs)
    return rng.choice([group for group, value in zip(groups, costs, strict=True) if value == least])


def at_random(
    job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
) -> SimulatedGroup:
    return rng.choice(groups)


def round_robin() -> Rule:
    turn = -1

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        nonlocal turn
        turn += 1
        return groups[turn % len(groups)]

    return rule


def least_loaded(
    job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
) -> SimulatedGroup:
    """Fewest requests, running or waiting."""
    return _least(groups, lambda group: group.outstanding, rng)


def consistent_hash() -> Rule:
    """The group whose point follows the hash of the prompt's first blocks on a ring."""
    ring: list[tuple[int, SimulatedGroup]] = []

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        if not ring:
            ring.extend((_place(f"{group.name}/{spot}"), group) for group in groups for spot in range(_RING))
            ring.sort(key=lambda entry: entry[0])
        first = tuple(int.from_bytes(block, "little") for block in job.chain[:_HASHED])
        key = _place(str(first or rng.random()))
        return ring[bisect(ring, key, key=lambda entry: entry[0]) % len(ring)][1]

    return rule


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def longest_match(
    job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
) -> SimulatedGroup:
    """The longest cached prefix; among equals the least loaded."""
    return _least(groups, lambda group: -prefix.blocks(group) * 1e6 + group.outstanding, rng)


def dynamo(weight: float = 1.0) -> Rule:
    """Fewest blocks: `weight` × those of prefill left, this prompt's uncached ones too, plus those being decoded."""

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        def cost(group: SimulatedGroup) -> float:
            left = group.queued_now(now) + job.prompt - prefix.blocks(group) * BLOCK
            return weight * (left / BLOCK) + group.tiers.in_use

        return _least(groups, cost, rng)

    return rule


def sglang(requests: float = 64) -> Rule:
    """Least loaded when most and least are more than `requests` and 1.5 times apart, else the longest match if it is
    long."""

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        loads = [group.outstanding for group in groups]
        if max(loads) - min(loads) > requests and max(loads) > 1.5 * min(loads):
            return least_loaded(job, groups, prefix, now, rng)
        if _longest_prefix(groups, prefix) > 0.3 * job.prompt:
            return longest_match(job, groups, prefix, now, rng)
        return _smallest_tree(groups, rng)

    return rule


def llm_d(weight: float = 2.0) -> Rule:
    """Highest of `weight` × share of the prompt cached + share of KV memory unused + how short the queue is."""

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        queues = [len(group.queue) for group in groups]
        most, span = max(queues), max(queues) - min(queues)

        def score(group: SimulatedGroup) -> float:
            cached = prefix.blocks(group) / len(job.chain) if job.chain else 0.0
            unused = 1 - group.tiers.in_use / group.model.blocks
            return weight * cached + unused + ((most - len(group.queue)) / span if span else 1.0)

        return _least(groups, lambda group: -score(group), rng)

    return rule


def ray_serve(requests: float = 10) -> Rule:
    """The better of two at random unless loads are within `requests` of each other: then the longest match if it is
    long."""

    def rule(
        job: SimulatedRequest, groups: Groups, prefix: CachedPrefix, now: float, rng: random.Random
    ) -> SimulatedGroup:
        loads = [group.outstanding for group in groups]
        if max(loads) - min(loads) < requests:
            if _longest_prefix(groups, prefix) >= 0.1 * job.prompt:
                return longest_match(job, groups, prefix, now, rng)
            return _smallest_tree(groups, rng)
        return _least(rng.sample(groups, min(2, len(groups))), lambda group: group.outstanding, rng)

    return rule


def rules() -> dict[str, Callable[[], Rule]]:
    """What makes every rule, as published, by its name. Each of several routers makes its own."""
    return {
        "random": lambda: at_random,
        "round robin": round_robin,
        "least loaded": lambda: least_loaded,
        "consistent hash": consistent_hash,
        "longest match": lambda: longest_match,
        "dynamo": dynamo,
        "sglang": sglang,
        "llm-d": llm_d,
        "ray serve": ray_serve,
    }
