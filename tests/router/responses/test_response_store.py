"""ResponseStore: what it keeps, and for whom."""

from hypothesis import given
from hypothesis import strategies as st

from coatcheck.router.responses.response_store import ResponseStore, StoredResponse, measure_bytes


def stored(number: int, size: int = 1, tenant: str = "a") -> StoredResponse:
    return StoredResponse(tenant, {"id": f"r{number}"}, (), size)


def test_the_oldest_is_dropped_first() -> None:
    """Beyond either limit the response that was stored first goes."""
    store = ResponseStore(max_responses=2, max_bytes=10)
    for number in range(3):
        store.add_response(stored(number))
    assert store.find_response("r0", "a") is None and store.find_response("r1", "a") is not None
    store.add_response(stored(3, size=10))
    assert store.find_response("r2", "a") is None and store.find_response("r3", "a") is not None


def test_a_response_that_is_too_large_drops_no_other() -> None:
    """A response with more bytes than the store may hold is not stored, and those of others stay."""
    store = ResponseStore(max_responses=2, max_bytes=10)
    store.add_response(stored(0))
    store.add_response(stored(1, size=11, tenant="b"))
    store.check()
    assert store.find_response("r0", "a") is not None and store.find_response("r1", "b") is None


def test_a_tenant_cannot_drop_the_responses_of_one_that_holds_less() -> None:
    """Beyond the number or the bytes, the tenant that holds most loses its oldest response."""
    for size, max_responses in ((1, 4), (10, 100)):
        store = ResponseStore(max_responses=max_responses, max_bytes=40)
        store.add_response(stored(0, size, "quiet"))
        for number in range(1, 50):
            store.add_response(stored(number, size, "busy"))
            store.check()
        assert store.find_response("r0", "quiet") is not None
        assert store.find_response("r46", "busy") is None and store.find_response("r47", "busy") is not None


def test_bytes_of_small_values_count() -> None:
    """Empty lists and dicts, which are two characters of JSON, count with the memory that they take."""
    assert measure_bytes([[], {}] * 1000) > 100_000
    assert measure_bytes({"a": "x" * 5000}) > 5000 and measure_bytes("\N{SNOWMAN}" * 1000) > 2000


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 12), st.sampled_from("ab"))))
def test_limits_always_hold(steps: list[tuple[bool, int, int, str]]) -> None:
    """Whatever is added and deleted, count and bytes stay within the limits, and only the owner finds a response."""
    store = ResponseStore(max_responses=4, max_bytes=20)
    for number, (adds, name, size, tenant) in enumerate(steps):
        if adds:
            store.add_response(stored(number, size, tenant))
            assert store.find_response(f"r{number}", tenant) is not None
            assert store.find_response(f"r{number}", "c") is None
        else:
            store.delete_response(f"r{name}", tenant)
        store.check()
