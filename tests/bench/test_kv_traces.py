"""The replay of a trace through the pool's own policy, and the optimum that bounds it."""

import random

import pytest

from coatcheck.bench.kv_cases.trace_replay import Arrival, fitting, gap_closed, mean_ttft, optimum, replay


def walk(count: int) -> list[Arrival]:
    """Chains over a few stems; some are used again soon, most never."""
    rng = random.Random(5)
    arrivals = []
    for number in range(count):
        stem = rng.choice([0, 1, 2]) * 100 if rng.random() < 0.4 else 1000 + number * 10
        arrivals.append(Arrival(float(number), tuple(range(stem, stem + rng.randint(2, 6)))))
    return arrivals


@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_a_pool_that_holds_all_finds_what_the_optimum_finds(eviction: str) -> None:
    """If nothing is evicted, every policy finds every block that was stored before."""
    trace = walk(100)
    assert replay(trace, 10_000, eviction).blocks == pytest.approx(optimum(trace, 10_000).blocks)


@pytest.mark.parametrize("capacity", [*(pytest.param(size, marks=pytest.mark.full) for size in (8, 20)), 12])
def test_cost_lies_between_lru_and_the_optimum(capacity: int) -> None:
    """If most prompts never come back, `cost` finds more than `lru`, and never more than the optimum."""
    trace = walk(600)
    lru, ours, best = replay(trace, capacity, "lru"), replay(trace, capacity, "cost"), optimum(trace, capacity)
    assert lru.blocks < ours.blocks <= best.blocks
    assert 0 < gap_closed(ours, lru, best) <= 1


def test_what_never_fits_is_left_out() -> None:
    """A prompt larger than the pool, which a server refuses, counts for no policy."""
    trace = [Arrival(0.0, (1, 2, 3)), Arrival(1.0, (1, 2))]
    assert fitting(trace, 2) == trace[1:]


def test_a_queue_of_prefills_is_shorter_where_blocks_are_found() -> None:
    """Prompts wait for those before them; found blocks shorten the prefills, and so the waits."""
    trace = [Arrival(0.0, (1, 2)), Arrival(0.0, (1, 2)), Arrival(8.0, (3, 4))]
    without, found = mean_ttft(trace, [0, 0, 0], 0.75), mean_ttft(trace, [0, 1, 0], 0.75)
    assert without == pytest.approx((2 + 4 + 2) / 3)  # each takes a third of 0.75 * 8 seconds
    assert without - found == pytest.approx(2 * 64 / 129 / 3)  # one block of two, and of their one attention
