"""Tenant: the scopes of its role, its salt, its priority and its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.errors import InvalidConfig, NeverFits, Overloaded, PermissionDenied
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, TokenIds
from coatcheck.router.access.tenant import ANONYMOUS, Scope, Tenant
from coatcheck.router.serving.generate_service import CallOptions
from coatcheck.router.telemetry.traffic import Traffic
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter


@pytest.mark.parametrize(
    ("role", "scope", "able"),
    [
        ("user", "generate", True),
        ("user", "observe", False),
        ("user", "manage", False),
        ("monitor", "generate", False),
        ("monitor", "observe", True),
        ("monitor", "manage", False),
        ("admin", "generate", True),
        ("admin", "observe", True),
        ("admin", "manage", True),
    ],
)
def test_a_role_allows_just_its_scopes(role: str, scope: Scope, able: bool) -> None:
    """Other scopes are refused, and the error lists the roles that have them."""
    tenant = Tenant("search", role=role)
    if able:
        tenant.require_scope(scope)
    else:
        with pytest.raises(PermissionDenied, match="'search' has the role .*admin"):
            tenant.require_scope(scope)


@given(st.text(min_size=1, max_size=8), st.text(max_size=8), st.text(min_size=1, max_size=8), st.text(max_size=8))
def test_no_salt_of_one_tenant_is_another_s(mine: str, asked: str, theirs: str, tried: str) -> None:
    """Combined salts are equal only for equal tenant salts and equal cache salts."""
    one, two = Tenant("one", salt=mine).combine_salt(asked), Tenant("two", salt=theirs).combine_salt(tried)
    assert (one == two) == ((mine, asked) == (theirs, tried))


def test_clients_only_give_way() -> None:
    """A request can only lower its tenant's priority; without keys it sets its own."""
    tenant = Tenant("search", priority=5)
    assert [tenant.effective_priority(asked) for asked in (-100, 0, 7, 2**31 - 1)] == [5, 5, 12, 2**31 - 1]
    assert ANONYMOUS.effective_priority(-100) == -100


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "a\nb"}, "printable"),
        ({"role": "root"}, "role is 'root'; it must be one of user, monitor, admin"),
        ({"weight": 0.0}, "weight is 0.0; it must be above 0"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"max_streams": 0}, "max_streams is 0; it must be at least 1"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens is -1"),
        ({"tokens_per_minute": 0.0}, "tokens_per_minute is 0.0; it must be above 0"),
        ({"priority": 2**31}, "priority is 2147483648"),
        ({"salt": "s" * 129}, "at most 128"),
    ],
)
def test_what_no_tenant_may_be(wrong: dict[str, object], said: str) -> None:
    """An invalid setting is refused with its name and the allowed values."""
    with pytest.raises(InvalidConfig, match=said):
        Tenant(**{"name": "search", **wrong})  # type: ignore[arg-type]  # wrong on purpose


def test_streams_are_bounded_per_tenant() -> None:
    """The open requests of a tenant count only against its own limit, until they end."""
    traffic, few = Traffic(), Tenant("few", max_streams=1)
    with traffic.count_request(few):
        with pytest.raises(Overloaded, match="'few' has 1 requests open"), traffic.count_request(few):
            pass
        with traffic.count_request(Tenant("many")), traffic.count_request():
            assert traffic.active == 3
    with traffic.count_request(few):
        assert traffic.active == 1


async def test_a_request_carries_its_tenant_to_the_group(start_router: StartRouter) -> None:
    """The group gets the tenant's salt and priority. A prompt that is too long for the tenant reaches no group."""
    group = FakeGroup()
    router = await start_router(group)
    tenant = Tenant("search", salt="s", priority=3, max_prompt_tokens=2)
    message = GenerateRequest(token_ids=TokenIds(ids=[5, 6]), cache_salt="c", priority=1)
    message.sampling.max_tokens = 1
    await router.server.generation.generate(message, CallOptions(tenant=tenant))
    (submit,) = group.submits
    assert (submit.cache_salt, submit.priority) == ("1:sc", 4)
    message.token_ids.ids.append(7)
    with pytest.raises(NeverFits, match="the prompt has 3 tokens, and 'search' may send 2"):
        await router.server.generation.generate(message, CallOptions(tenant=tenant))
    assert len(group.submits) == 1
