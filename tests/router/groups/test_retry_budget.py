"""RetryBudget: how many requests a router sends again at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from coatcheck.router.groups.retry_budget import RetryBudget
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(0, 2000))
def test_all_streams_may_be_lost_twice_at_once(streams: int) -> None:
    """Each open request may be sent again at once twice; later retries wait."""
    budget = RetryBudget(_Clock())
    for _ in range(streams):
        budget.open_request()
    assert [budget.spend_retry() for _ in range(2 * streams)] == [0.0] * (2 * streams)
    waits = [budget.spend_retry() for _ in range(streams + 21)]
    assert 0.0 < max(waits) <= 10.0 and waits == sorted(waits)
    assert budget.delayed == sum(wait > 0 for wait in waits) and budget.spent == 3 * streams + 21


@given(st.lists(st.sampled_from(["open", "close", "take", "wait"]), max_size=200))
def test_a_bucket_neither_overflows_nor_owes_for_ever(does: list[str]) -> None:
    """After any calls the bucket has at most two retries for each open request and twenty, and after a while exactly
    these."""
    clock = _Clock()
    budget, opened = RetryBudget(clock), 0
    for what in does:
        if what == "open":
            budget.open_request()
            opened += 1
        elif what == "close" and opened:
            budget.close_request()
            opened -= 1
        elif what == "take":
            budget.spend_retry()
        elif what == "wait":
            clock.now += 0.1
        budget.check()
        assert budget.left <= 20 + 2 * opened
    clock.now += 1000.0
    assert budget.left == 20 + 2 * opened


@given(st.integers(0, 500), st.integers(0, 500))
def test_ended_requests_leave_no_debt(streams: int, gone: int) -> None:
    """When many waiting requests have ended, the others wait at most ten seconds."""
    budget = RetryBudget(_Clock())
    for _ in range(streams + gone + 1):
        budget.open_request()
    for _ in range(20 + 3 * (streams + gone + 1)):  # all of the budget, and then each waits
        budget.spend_retry()
    for _ in range(gone):
        budget.close_request()
        budget.check()
    assert 0.0 < budget.spend_retry() <= 10.0


async def test_a_lost_group_costs_no_stream_and_is_counted(start_router: StartRouter) -> None:
    """Half of fifty streams lose their group at once: all continue, none is delayed, and /metrics counts the retries.
    They are more retries than a bucket without open requests has."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=1) for name in ("a", "b")}
    router = await start_router(*groups.values())
    streams = [Stream(router, ask()) for _ in range(50)]
    where = [(await stream.read()).started.group for stream in streams]
    for stream in streams:
        await stream.read()
    lost = max(set(where), key=where.count)
    for group in groups.values():
        group.go()
    await groups[lost].kill()
    for stream in streams:
        await stream.finish()
        assert stream.ids == ids
    page = router.server.metrics.render().decode()
    values = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples if not s.labels}
    assert values["coatcheck_retry_budget_spent_total"] == where.count(lost)
    assert values["coatcheck_retry_budget_delayed_total"] == 0
    assert 20 <= values["coatcheck_retry_budget_requests"] + where.count(lost) <= 20 + 2 * 50
    causes = {s.labels["cause"]: s.value for f in text_string_to_metric_families(page) for s in f.samples
              if s.name == "coatcheck_group_losses_total"}  # fmt: skip
    assert causes == pytest.approx({"planned": 0, "crash": 0, "killed": 0, "unknown": 1})
