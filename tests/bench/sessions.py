"""A small workload for tests of the routing benchmark."""

import random

from coatcheck.bench.routing_simulation.service_model import BLOCK
from coatcheck.bench.routing_simulation.workload import Workload
from coatcheck.cluster.benchmark.request_trace import TraceEntry


def sessions(count: int, turns: int, seed: int = 0) -> Workload:
    """Chats that grow by three blocks a turn below one block that all share; one arrives every 0.4 s."""
    dice = random.Random(seed)
    chains: list[tuple[int, ...]] = [(0,)] * count
    entries = []
    for place in range(count * turns):
        chat = dice.randrange(count)
        chains[chat] += tuple(1000 * place + part + 1 for part in range(3))
        length = len(chains[chat]) * BLOCK + 1
        entries.append(TraceEntry(place * 0.4, length, 100, chains[chat]))
    return Workload(entries)
