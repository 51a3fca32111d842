"""Rate limits: a request within the limit is accepted, another is told when to come again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.errors import Overloaded
from coatcheck.router.access.rate_limits import RateLimit, TenantLimits
from coatcheck.router.access.tenant import Tenant


@given(st.floats(0.5, 1e6), st.lists(st.tuples(st.floats(0, 30), st.floats(1, 100)), max_size=50))
def test_a_limit_holds_over_any_time(per_minute: float, asked: list[tuple[float, float]]) -> None:
    """In any period at most a minute's amount, the period's refill, and one last overdraft are granted. A request after
    the announced wait is granted."""
    limit, now, given_so_far, largest = RateLimit(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause, amount in asked:
        now += pause
        if limit.seconds_until_available(now) > 0:
            now += limit.seconds_until_available(now) * (1 + 1e-9) + 1e-6
            assert limit.seconds_until_available(now) == 0
        limit.consume(amount, now)
        given_so_far += amount
        largest = max(largest, amount)
        assert given_so_far <= max(per_minute, 1) + now * per_minute / 60 + largest + 1e-6 * per_minute


def test_a_tenant_is_told_when_to_come_again() -> None:
    """Requests and tokens are limited separately for each tenant, and the announced wait is the time that the bucket
    needs."""
    now = 0.0
    limits = TenantLimits(lambda: now)
    slow = Tenant("slow", requests_per_minute=2, tokens_per_minute=600)
    limits.charge_request(slow)
    limits.charge_request(slow)
    with pytest.raises(Overloaded, match="2 requests a minute") as refused:
        limits.charge_request(slow)
    assert refused.value.retry_seconds == pytest.approx(30)
    limits.charge_request(Tenant("other", requests_per_minute=2))
    now = 30.0
    limits.charge_request(slow)
    limits.charge_tokens(slow, 900)  # a prompt and its answer, of a bucket that holds 600 and fills by 10 a second
    now = 60.0
    with pytest.raises(Overloaded, match="600 tokens a minute") as refused:
        limits.charge_request(slow)
    assert refused.value.retry_seconds == pytest.approx(0.1)
    now = 60.2
    limits.charge_request(slow)
