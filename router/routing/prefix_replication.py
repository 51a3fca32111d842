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

import numpy as np

from coatcheck.router.routing.routing_cost import Decision, FloatArray, GroupCosts

_MAX_PREFIXES: Final = 10_000  # the least recently used are forgotten


class PrefixReplication:
    """One for each router. Call `consider_copy` with every decision that is carried out, in order."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._rents: OrderedDict[bytes, float] = OrderedDict()  # last block of a prefix -> seconds

    def consider_copy(self, decision: Decision, chain: Sequence[bytes], block_size: int) -> Decision:
        """Returns the decision, or the same with another group, which shall compute one more copy of the prefix that
        the chosen group holds. `chain`: hashes of the prompt's full blocks of `block_size` tokens."""
        costs, chosen = decision.table, decision.chosen
        held = min(chosen.cached_tokens, decision.prompt_tokens)
        blocks = min(held // block_size, len(chain))
        if not blocks:
            return decision
        others = costs.has_room & (costs.cached_tokens < held)
        if not others.any():
            return decision
        seconds = np.where(others, _seconds_if_held(costs, decision.prompt_tokens, held), np.inf)
        best = int(seconds.argmin())
        least = float(seconds[best])
        rent = chosen.first_token_seconds - least
        if rent <= 0:
            return decision
        holders = int((costs.cached_tokens >= chosen.cached_tokens).sum())
        prefix = chain[blocks - 1]
        rents = self._rents.pop(prefix, 0.0) + rent / (holders + 1)
        if rents < costs.total_seconds[best] - least:
            self._rents[prefix] = rents
            if len(self._rents) > self._max_prefixes:
                self._rents.popitem(last=False)
            return decision
        return replace(decision, index=best, makes_copy=True)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert len(self._rents) <= self._max_prefixes
        assert all(rent > 0 for rent in self._rents.values())


def _seconds_if_held(costs: GroupCosts, prompt_tokens: int, held: int) -> FloatArray:
    """Seconds to the first token on groups that hold less than `held` tokens of the prompt, if they held these on the
    device. For other groups the figures mean nothing."""
    uncached = np.maximum(prompt_tokens - costs.cached_tokens, 1)
    part = (prompt_tokens - held) / uncached
    prompt_steps = costs.decode_seconds * uncached / (costs.queued_tokens + uncached)  # without the steps of the queue
    return costs.queue_seconds + costs.prefill_seconds * part + costs.decode_seconds - prompt_steps * (1 - part)
