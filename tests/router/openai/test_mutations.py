"""Mutated requests: none causes a server error, and none stays open."""

import asyncio
import http.client
import random
from collections import Counter
from contextlib import closing

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.openai.mutations import mutated


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.full)])
async def test_mutated_requests_never_break_the_router(start_http_router: StartHttpRouter, count: int) -> None:
    """Each body is answered or refused as the client's error, and no request stays open."""
    router = await start_http_router(FakeGroup())
    seen = await asyncio.to_thread(send, router.http_address, count)
    assert set(seen) <= {200, 400, 404}, seen
    assert seen[200] > count / 20 and seen[400] > count / 4, seen
    assert router.server.traffic.active == 0
    assert not any(len(link.submissions) for link in router.server.groups.connections)


def send(address: str, count: int) -> Counter[int]:
    """How often each status was returned. Fails, with the body, if a status is a server error."""
    dice, seen = random.Random(11), Counter[int]()
    with closing(http.client.HTTPConnection(address, timeout=MAX_WAIT_SECONDS)) as connection:
        for _ in range(count):
            path, body = mutated(dice)
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 500, (path, body, text)
            assert b'"server_error"' not in text, (path, body, text)
            seen[answer.status] += 1
    return seen
