"""A burst over HTTP: requests beyond the queue get 429 with Retry-After."""

import asyncio
import json

from tests.router.http.conftest import OpenWeb
from tests.router.seated_group import SeatedGroup

SEATS, READY = 8, 4
REQUESTS, QUEUED = 300, 100  # connections that a process with 1,024 open files can have, at both of their ends


async def ask(address: str) -> tuple[int, dict[str, str]]:
    """(status, headers) of one completion on a connection of its own."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "seed": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        answer, _, _ = (await reader.read()).partition(b"\r\n\r\n")
        status, *headers = answer.decode().split("\r\n")
        return int(status.split()[1]), dict(header.lower().split(": ", 1) for header in headers)
    finally:
        writer.close()


async def test_max_queued_holds_in_a_burst_over_http(open_web: OpenWeb) -> None:
    """In a burst two groups get what they have room for, `max_queued` requests wait, and all others get 429 with
    Retry-After; accepted requests are answered."""
    groups = [SeatedGroup(name, SEATS) for name in ("g0", "g1")]
    web = await open_web(*groups, max_queued=QUEUED)
    line = web.door.router.dispatch.line
    room = len(groups) * (SEATS + READY)
    asked = [asyncio.create_task(ask(web.address)) for _ in range(REQUESTS)]
    async with asyncio.timeout(100):
        while len(line) + sum(task.done() for task in asked) != REQUESTS - room:
            for group in groups:
                group.say_late()
            await asyncio.sleep(0.07)
    assert len(line) == QUEUED
    assert [group.most_held for group in groups] == [SEATS + READY] * 2
    for group in groups:
        group.go()
    answers = await asyncio.gather(*asked)
    refused = [headers for status, headers in answers if status == 429]
    assert [status for status, _ in answers].count(200) == QUEUED + room
    assert len(refused) == REQUESTS - QUEUED - room
    assert all(int(headers["retry-after"]) >= 1 for headers in refused)
    assert [group.most_held for group in groups] == [SEATS + READY] * 2
