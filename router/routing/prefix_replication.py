"""PrefixReplication: when one more group should compute a prefix that other groups hold already.

A group that holds a popular prefix is the cheapest group for each request with that prefix, taken alone: to compute the
prefix elsewhere costs more than to wait a little. All these requests together may wait far longer than another copy
takes to compute. That is the ski rental problem: each wait is a rent, the copy is the price of buying, and to buy when
the rents paid have reached the price costs at most twice what the best decision in hindsight would have cost (Karlin,
Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988).

The rent of a request is the time that it waits because no other group holds the prefix. A further copy beside k others
would be used by one request in k + 1, so the rent counts 1 / (k + 1).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coatcheck.router.routing.routing_cost import Decision, GroupCost

_MAX_PREFIXES: Final = 10_000  # the least recently used are forgotten


class PrefixReplication:
    """One for each router. `review` every decision that is carried out, in order."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._rents: OrderedDict[bytes, float] = OrderedDict()  # last block of a prefix -> seconds

    def review(self, decision: Decision, chain: Sequence[bytes], block_size: int) -> Decision:
        """Returns the decision, or the same with another group, which shall compute one more copy of the prefix that
        the chosen group holds. `chain`: hashes of the prompt's full blocks of `block_size` tokens."""
        chosen = decision.chosen
        held = min(chosen.cached_tokens, decision.prompt_tokens)
        others = [cost for cost in decision.costs if cost.has_room and cost.cached_tokens < held]
        blocks = min(held // block_size, len(chain))
        if not others or not blocks:
            return decision
        remaining = decision.prompt_tokens - held
        seconds = [_seconds_if_held(cost, decision.prompt_tokens - cost.cached_tokens, remaining) for cost in others]
        least = min(seconds)
        rent = chosen.first_token_seconds - least
        if rent <= 0:
            return decision
        holders = sum(cost.cached_tokens >= chosen.cached_tokens for cost in decision.costs)
        prefix = chain[blocks - 1]
        rents = self._rents.pop(prefix, 0.0) + rent / (holders + 1)
        best = others[seconds.index(least)]
        if rents < best.total_seconds - least:
            self._rents[prefix] = rents
            if len(self._rents) > self._max_prefixes:
                self._rents.popitem(last=False)
            return decision
        return replace(decision, group=best.group, makes_copy=True)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert len(self._rents) <= self._max_prefixes
        assert all(rent > 0 for rent in self._rents.values())


def _seconds_if_held(cost: GroupCost, uncached: int, remaining: int) -> float:
    """The seconds to the first token on a group that would have to compute only `remaining` tokens of the prompt, in
    place of the `uncached` that its cost counts."""
    part = remaining / uncached
    prompt_steps = cost.decode_seconds * uncached / (cost.queued_tokens + uncached)  # without the steps of the queue
    return cost.queue_seconds + cost.prefill_seconds * part + cost.decode_seconds - prompt_steps * (1 - part)
