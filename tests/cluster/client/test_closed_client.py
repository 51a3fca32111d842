"""What `close` does to calls that run, and to later ones."""

import asyncio

import pytest

import coatcheck
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client.async_client import AsyncClient
from tests.cluster.fake_router import FakeRouter


async def test_closing_ends_the_calls_that_run() -> None:
    """A stream that waits for a token raises RuntimeError, and no CancelledError as if its task were cancelled."""
    async with FakeRouter() as router:
        router.stalls_after = 2
        client = AsyncClient([router.address])
        call = asyncio.create_task(client.generate("a", max_tokens=9))
        await asyncio.wait_for(router.crowded(1), MAX_WAIT_SECONDS)
        await client.close()
        with pytest.raises(RuntimeError, match="the client was closed during the call"):
            await asyncio.wait_for(call, MAX_WAIT_SECONDS)


async def test_a_closed_client_takes_no_calls() -> None:
    """After `close` every call raises RuntimeError, and the router gets no request."""
    async with FakeRouter() as router:
        async with AsyncClient([router.address]) as client:
            await client.generate("a", max_tokens=2)
            stream = client.stream("a", max_tokens=2)  # not sent before it is read
        await client.close()
        calls = [stream.read_all(), client.generate("a"), client.chat([]), client.get_model(), client.detokenize([1])]
        for call in [*calls, client.tokenize("a"), client.explain("a")]:
            with pytest.raises(RuntimeError, match="the client is closed"):
                await call
    assert len(router.requests) == 1


def test_a_closed_blocking_client_says_so() -> None:
    """A call on a closed client raises, and closing twice is allowed."""
    client = coatcheck.Client()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get_model()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_closing_ends_the_calls_of_other_threads(is_lost: bool) -> None:
    """A call that waits for a token, or for a router to come back, raises RuntimeError when the client is closed."""
    async with FakeRouter(losses=[3] * 1000 if is_lost else None) as router:
        router.stalls_after = None if is_lost else 2
        client = coatcheck.Client(router.address, max_resumes=999, resume_timeout=MAX_WAIT_SECONDS)
        call = asyncio.create_task(asyncio.to_thread(client.generate, "a", max_tokens=900))
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            await router.requested(4 if is_lost else 1)
            await asyncio.to_thread(client.close)
            with pytest.raises(RuntimeError, match="the client (was closed during the call|is closed)"):
                await call
