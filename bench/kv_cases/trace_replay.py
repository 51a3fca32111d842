"""Prompt blocks found in the cache, by eviction policy and pool size, when a trace runs through the server's BlockPool.

Each request looks up its blocks, shares the cached ones, allocates and registers the others, and releases all of them,
at the times of the trace. Belady's optimum, which keeps the blocks whose next uses are soonest, bounds every policy
from above.
"""

import gzip
import heapq
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from coatcheck.bench.setup.public_traces import CONVERSATION, SYNTHETIC
from coatcheck.workers.kv.block_pool import BlockPool
from coatcheck.workers.kv.eviction import Evictor
from coatcheck.workers.kv.eviction_policy import create_policy
from coatcheck.workers.kv.prefix_registry import PrefixRegistry, choose_max_ghosts

CAPACITIES = (250, 1000, 3000, 10000)
TRACES = tuple(file.removesuffix(".jsonl.gz") for file in (CONVERSATION, SYNTHETIC))
# A block of the traces has 512 tokens; attention doubles a token's cost at some 32,000 in models of 8 billion weights.
CROSSOVER_BLOCKS = 64.0
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when, and the id of each prompt block."""

    seconds: float
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hits:
    """Shares that are found: `blocks` of the prompt blocks, `cost` of the time to compute them."""

    blocks: float
    cost: float


def read_trace(path: Path) -> list[Arrival]:
    """A Mooncake trace."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Arrival(row["timestamp"] / 1000, tuple(row["hash_ids"])) for row in rows]


def fitting(trace: list[Arrival], capacity: int) -> list[Arrival]:
    """The arrivals whose prompts fit the pool. A server refuses the others."""
    return [arrival for arrival in trace if len(arrival.blocks) <= capacity]


def replay(trace: list[Arrival], capacity: int, eviction: str, ghosts: int | None = None, start: int = 0) -> Hits:
    """The hits of a pool of `capacity` blocks by reuse rate alone; only arrivals from number `start` on are counted."""
    found = count_found(trace, capacity, eviction, ghosts=ghosts)[start:]
    asked = [len(arrival.blocks) for arrival in trace[start:]]
    return Hits(sum(found) / sum(asked), sum(map(_cost, found)) / sum(map(_cost, asked)))


def mean_ttft(trace: list[Arrival], found: list[int], load: float) -> float:
    """Mean seconds from each arrival to the end of its prefill, on a server that prefills one prompt at a time.

    `found`: cached blocks of each arrival. `load`: the share of the time that prefills without any cache would take.
    """
    seconds = trace[-1].seconds - trace[0].seconds
    unit = load * seconds / sum(_cost(len(arrival.blocks)) for arrival in trace)
    total = free_at = 0.0
    for arrival, cached in zip(trace, found, strict=True):
        free_at = max(free_at, arrival.seconds) + unit * (_cost(len(arrival.blocks)) - _cost(cached))
        total += free_at - arrival.seconds
    return total / len(trace)


def count_found(
    trace: list[Arrival], capacity: int, eviction: str, crossover: float = math.inf, ghosts: int | None = None
) -> list[int]:
    """The cached leading blocks of each arrival, when all pass through a pool of `capacity` blocks."""
    registry = PrefixRegistry(ghosts or choose_max_ghosts(capacity))
    pool = BlockPool(capacity, Evictor(registry, create_policy(eviction, registry.reuse_table, crossover), capacity))
    counts = []
    for arrival in trace:
        names = [struct.pack("<Q", block) for block in arrival.blocks]
        registry.advance_clock(arrival.seconds)
        registry.record_request(names)
        found: list[int] = []
        for name in names:
            block = pool.get_cached_block(name)
            if block is None:
                break
            found.append(block)
        pool.share_blocks(found)
        computed = pool.allocate_blocks(len(names) - len(found))
        for depth, block in enumerate(computed, len(found)):
            pool.register_block(block, names[depth], names[depth - 1] if depth else b"", depth)
        pool.release_blocks([*found, *computed])
        pool.drain_events()
        counts.append(len(found))
    return counts


def optimum(trace: list[Arrival], capacity: int, start: int = 0) -> Hits:
    """The hits of Belady's optimum, which knows the future."""
    wanted_next: list[list[int]] = []
    following: dict[int, int] = {}
    for number in range(len(trace) - 1, -1, -1):
        wanted_next.append([following.get(block, _NEVER) for block in trace[number].blocks])
        following.update(dict.fromkeys(trace[number].blocks, number))
    wanted_next.reverse()
    held: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    hits = asked = 0
    saved = cost = 0.0
    for number, arrival in enumerate(trace):
        found = next((i for i, block in enumerate(arrival.blocks) if block not in held), len(arrival.blocks))
        for depth, (block, later) in enumerate(zip(arrival.blocks, wanted_next[number], strict=True)):
            if later == _NEVER:
                held.pop(block, None)
            else:
                held[block] = later
                heapq.heappush(queue, (-later, -depth, block))
        while len(held) > capacity:
            later, _, block = heapq.heappop(queue)
            if held.get(block) == -later:
                del held[block]
        if number >= start:
            hits += found
            asked += len(arrival.blocks)
            saved += _cost(found)
            cost += _cost(len(arrival.blocks))
    return Hits(hits / asked, saved / cost)


def gap_closed(hits: Hits, lru: Hits, best: Hits) -> float:
    """The share of the gap in blocks between LRU and the optimum that `hits` closes."""
    return (hits.blocks - lru.blocks) / (best.blocks - lru.blocks) if best.blocks > lru.blocks else 0.0


def _cost(blocks: int) -> float:
    """Time to compute a prompt's first `blocks` blocks, in units of one block without attention."""
    return blocks + blocks * (blocks - 1) / 2 / CROSSOVER_BLOCKS
