"""No request, however large in whatever way, stops another one's stream.

The router runs in a process of its own, which measures how long its event loop cannot serve anybody (see
watched_router). What is measured is processor time, and the limit grows with the time that a fixed computation takes
just then, so that a slow or busy machine changes nothing.
"""

import asyncio
import http.client
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, GetModelResponse, SamplingParams, TokenIds
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from tests.router.fake_group import EOS, VOCAB, FakeGroup
from tests.router.hostile_bodies import (
    ANSWERED_MESSAGES,
    ANSWERS,
    BODIES,
    MESSAGES,
    SAMPLED_ANSWERS,
    SAMPLED_BODIES,
    SAMPLED_MESSAGES,
)

_MAX_SECONDS: Final = 0.1
_USUAL_REFERENCE: Final = 0.045  # seconds of reference_seconds() on a machine of today
_TRIES: Final = 3  # the best counts: an unlucky moment of the machine is not the router's


class WatchedRouter:
    """A router process in front of one fake group, with a stream that runs all the time. Sends large requests to it."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, str], group: FakeGroup) -> None:
        self.process = process
        self.http = addresses["http"]
        self.channel = grpc.aio.insecure_channel(addresses["grpc"], options=[("grpc.max_receive_message_length", -1)])
        self.group = group
        request = GenerateRequest(
            token_ids=TokenIds(ids=[7]), sampling=SamplingParams(max_tokens=8000, ignore_eos=True)
        )
        self.stream = GenerationStub(self.channel).GenerateStream(request)

    async def command(self, word: str) -> dict[str, float]:
        """Sends one line to the process and returns its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word.encode() + b"\n")
        answer: dict[str, float] = json.loads(await self.process.stdout.readline())
        return answer

    async def post(self, path: str, body: bytes) -> int:
        """The status of the answer."""
        return await asyncio.to_thread(self._post, path, body)

    async def call(self, method: str, message: bytes) -> str:
        """The status' name."""
        path = method if method.startswith("/") else f"/coatcheck.v1.Generation/{method}"
        call = self.channel.stream_unary(path)  # type: ignore[call-arg]
        try:
            await call(iter([message]))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def is_streaming(self) -> None:
        """Returns once the stream has brought a token that was made after this call."""
        made = self.group.hold_after or 0
        got = 0
        self.group.go(made + 1)
        async with asyncio.timeout(60):
            while not got:
                event = await self.stream.read()
                got = len(event.delta.token_ids)

    def _post(self, path: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(self.http, timeout=200)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()


def _first_only(submit: Any, choice: int, position: int) -> int:
    return 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(model_directory: Path) -> AsyncIterator[WatchedRouter]:
    """One router for most of these tests."""
    async with _watched(model_directory, 8192) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_router(model_directory: Path) -> AsyncIterator[WatchedRouter]:
    """A router whose answers can be large."""
    async with _watched(model_directory, 1 << 17) as made:
        yield made


@asynccontextmanager
async def _watched(model_directory: Path, max_model_len: int) -> AsyncIterator[WatchedRouter]:
    model = GetModelResponse(
        name="tiny", max_model_len=max_model_len, vocab_size=VOCAB, block_size=16, dtype="float32", kv_dtype="float32",
        fingerprint="weights", eos_token_ids=[EOS],
    )  # fmt: skip
    group = FakeGroup(model=model, num_blocks=1 << 16, hold_after=1, token=_first_only, chunk=8192, with_tops=True)
    address = await group.start()
    pipe = asyncio.subprocess.PIPE
    command = ("-m", "tests.router.watched_router", str(model_directory), "5000", f"g0={address.address}")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        made = WatchedRouter(process, json.loads(await process.stdout.readline()), group)
        yield made
        await made.channel.close()  # type: ignore[call-arg]
    finally:
        process.stdin.close()
        await process.wait()
        await group.kill()


async def _holds(router: WatchedRouter, *requests: Any) -> tuple[float, float]:
    """(longest hold while the requests are answered, permitted hold), in seconds."""
    reference = (await router.command("begin"))["reference"]
    await asyncio.gather(router.is_streaming(), *(request() for request in requests))
    held = (await router.command("end"))["longest_hold"]
    return held, _MAX_SECONDS * max(1.0, reference / _USUAL_REFERENCE)


async def _assert_nobody_is_stopped(router: WatchedRouter, *requests: Any) -> None:
    tried = []
    for _ in range(_TRIES):
        held, permitted = await _holds(router, *requests)
        if held <= permitted:
            return
        tried.append(f"{1000 * held:.0f} of {1000 * permitted:.0f} ms")
    raise AssertionError(f"the event loop was held for {', '.join(tried)}")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", SAMPLED_BODIES)
async def test_no_body_stops_a_stream(router: WatchedRouter, kind: str) -> None:
    """By HTTP: the body is answered or refused, and meanwhile no hold of the event loop is longer than 100 ms."""
    path, body = BODIES[kind]()

    async def send() -> None:
        assert await router.post(path, body) in (200, 400, 404, 413)

    await _assert_nobody_is_stopped(router, send)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", SAMPLED_MESSAGES)
async def test_no_message_stops_a_stream(router: WatchedRouter, kind: str) -> None:
    """By gRPC as well."""
    method, message = MESSAGES[kind]()

    async def send() -> None:
        assert await router.call(method, message) in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED")

    await _assert_nobody_is_stopped(router, send)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", SAMPLED_ANSWERS)
async def test_no_large_answer_stops_a_stream(long_router: WatchedRouter, kind: str) -> None:
    """By HTTP: answers of up to a million log-probabilities."""
    path, body = ANSWERS[kind]()

    async def send() -> None:
        long_router.group.go(100)
        assert await long_router.post(path, body) == 200

    await _assert_nobody_is_stopped(long_router, send)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ANSWERED_MESSAGES)
async def test_no_large_message_in_answer_stops_a_stream(long_router: WatchedRouter, kind: str) -> None:
    """By gRPC as well."""
    method, message = ANSWERED_MESSAGES[kind]()

    async def send() -> None:
        assert await long_router.call(method, message) == "OK"

    await _assert_nobody_is_stopped(long_router, send)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["100,000 messages", pytest.param("2 million ids", marks=pytest.mark.full)])
async def test_eight_bodies_at_once_stop_no_stream(router: WatchedRouter, kind: str) -> None:
    """Eight bodies wait for each other and delay no other request; those beyond the limit get 429."""
    path, body = BODIES[kind]()

    async def send() -> None:
        assert await router.post(path, body) in (400, 429)

    await _assert_nobody_is_stopped(router, *[send] * 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_short_request_passes_long_ones(router: WatchedRouter) -> None:
    """While eight long bodies are read, a short one is answered before the last of them."""
    path, body = BODIES["100,000 messages"]()
    long = [asyncio.create_task(router.post(path, body)) for _ in range(8)]
    assert await router.post("/v1/completions", b'{"prompt":"a","max_tokens":1}') == 200
    assert not all(task.done() for task in long)
    assert set(await asyncio.gather(*long)) <= {400, 429}
