"""ReuseAfterEviction: what an evicted block is worth, measured from those that come back."""

import random
import time

import pytest

from coatcheck.router.routing.reuse_after_eviction import ReuseAfterEviction


def name(number: int) -> bytes:
    """A block."""
    return number.to_bytes(16, "little")


def test_nothing_is_regretted_until_something_comes_back() -> None:
    """Blocks that are given up for good cost nothing."""
    reuse = ReuseAfterEviction()
    for number in range(1000):
        reuse.record_evicted(name(number), held=400)
        reuse.record_stored(name(number + 10_000))
    assert reuse.rate == 0.0


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_the_rate_is_the_share_that_comes_back_over_the_room_remembered(share: float) -> None:
    """With a quarter more room remembered, n of 100 evicted blocks coming back make a rate of 4n in 100."""
    reuse, dice = ReuseAfterEviction(), random.Random(1)
    for number in range(20_000):
        reuse.record_evicted(name(number), held=400)
        if dice.random() < share:
            reuse.record_stored(name(number - dice.randrange(min(50, number + 1))))
    assert reuse.rate == pytest.approx(4 * share, rel=0.25)


def test_what_comes_back_too_late_is_not_regretted() -> None:
    """A quarter more room would not have kept a block for as long as that."""
    reuse = ReuseAfterEviction()
    for number in range(5000):
        reuse.record_evicted(name(number), held=400)
        if number >= 200:
            reuse.record_stored(name(number - 200))
    assert reuse.rate == 0.0


def test_the_rate_is_a_chance() -> None:
    """However often the same block comes and goes, the rate stays within 1."""
    reuse = ReuseAfterEviction()
    for _ in range(1000):
        reuse.record_evicted(name(1), held=400)
        reuse.record_stored(name(1))
    assert reuse.rate == 1.0


def test_an_eviction_costs_the_same_however_many_came_before() -> None:
    """With a quarter of a million names remembered an eviction takes about as long as with sixty-four: its cost grows
    neither with the names nor with those that have left."""

    def seconds(held: int, first: int) -> float:
        """The quickest of ten times 2,000 evictions, once the memory is full."""
        reuse = ReuseAfterEviction()
        for number in range(first):
            reuse.record_evicted(name(number), held)
        best = float("inf")
        for start in range(first, first + 20_000, 2000):
            blocks = [name(number) for number in range(start, start + 2000)]
            began = time.perf_counter()
            for block in blocks:
                reuse.record_evicted(block, held)
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(1_000_000, 280_000) < 20 * seconds(0, 1000)
