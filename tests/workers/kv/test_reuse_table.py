"""Reuse rates learned from when blocks were requested again."""

from typing import Any

from coatcheck.workers.kv.reuse_table import ReuseTable


def simulate_requests(table: ReuseTable, kind: int, seconds: int, again: float | None) -> None:
    """One block a second for `seconds`; each is requested again after `again` seconds, or never."""
    start = table.now
    begun: list[Any] = []
    for second in range(seconds):
        table.advance_clock(start + second)
        if again is not None:
            for cohort in [c for c in begun if table.now - c.since >= again]:
                table.record_reuse(cohort)
                begun.remove(cohort)
        begun.append(table.create_cohort(kind))
        table.add_block(begun[-1])


def test_kinds_that_are_requested_again_have_a_higher_rate() -> None:
    """A kind that always comes back within seconds has a higher rate at every early age than one that never does."""
    table = ReuseTable(2)
    simulate_requests(table, 0, 500, None)
    simulate_requests(table, 1, 500, 3.0)
    table.advance_clock(table.now + 1)
    assert all(table.reuse_rate(1, band) > 10 * table.reuse_rate(0, band) for band in range(3))


def test_the_rate_rises_towards_the_time_of_reuse_and_falls_after_it() -> None:
    """If all blocks come back after a minute, the rate is highest just before that, and low afterwards."""
    table = ReuseTable(1)
    simulate_requests(table, 0, 2000, 60.0)
    table.advance_clock(table.now + 1)
    rates = [table.reuse_rate(0, band) for band in range(9)]
    due = table.band_of(60.0)
    assert rates[:due] == sorted(rates[:due])
    assert max(rates) == rates[due]
    assert rates[due + 1] < rates[due] / 10


def test_a_cohort_is_counted_in_every_band_that_its_age_has_passed() -> None:
    """A jump of the clock over several bands counts a cohort in each of them."""
    table = ReuseTable(1)
    cohort = table.create_cohort(0)
    for _ in range(5):
        table.add_block(cohort)
    table.advance_clock(100.0)
    assert cohort.band == table.band_of(100.0)
    table.record_reuse(cohort)
    assert cohort.size == 4
