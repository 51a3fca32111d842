"""A synthetic trace: all requests share one system prompt, and each adds a few hundred tokens of its own."""

import random

from coatcheck.bench.routing_simulation.service_model import BLOCK
from coatcheck.cluster.benchmark.request_trace import TraceEntry

SHARED_PROMPT = "shared prompt"  # the trace's name in cells
_REQUESTS = 10_000


def shared_prompt_trace(requests: int = _REQUESTS, shared_blocks: int = 8, seed: int = 0) -> list[TraceEntry]:
    """Poisson arrivals, one a second on average: `shared_blocks` × 512 tokens that all share, 400 to 600 tokens of
    their own, and answers of 100 to 300 tokens, all uniform. The same seed gives the same trace."""
    dice = random.Random(seed)
    entries = []
    at = 0.0
    for number in range(requests):
        at += dice.expovariate(1.0)
        length = shared_blocks * BLOCK + dice.randint(400, 600)
        own_blocks = range(shared_blocks, length // BLOCK)
        chain = (*range(shared_blocks), *(shared_blocks * (number + 1) + block for block in own_blocks))
        entries.append(TraceEntry(at, length, dice.randint(100, 300), chain))
    return entries
