"""Clients that stop reading, over real sockets: their streams end, and neither memory nor blocks stay with them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.config import RouterConfig
from tests.router.event_loop.http2_frames import OPENING, call_frames
from tests.router.fake_group import EOS, VOCAB, FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter

_CHOICES, _TOKENS = 4, 3000
_MODEL = pb.GetModelResponse(
    name="tiny", max_model_len=20_000, vocab_size=VOCAB, block_size=4, dtype="float32", kv_dtype="float32",
    fingerprint="weights", eos_token_ids=[EOS],
)  # fmt: skip


@asynccontextmanager
async def plain_socket(address: str) -> AsyncIterator[socket.socket]:
    """A socket that receives a few kilobytes and then no more."""
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        yield client


async def is_given_up(router: RouterUnderTest, group: FakeGroup) -> None:
    """Waits until the group is told to abort, and the router has no open request."""
    await group.until(lambda: bool(group.aborts))
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await router.server.traffic.wait_until_idle()
    assert all(not len(connection.submissions) for connection in router.server.groups.connections)


async def test_sse(start_router: StartRouter) -> None:
    """The connection ends after `slow_reader_seconds` without a read, and the stream with it; other requests are
    served."""
    group = FakeGroup(model=_MODEL, num_blocks=8000, hold_after=_TOKENS - 1)  # else it may have ended by then
    router = await start_router(group, http_port=0, slow_reader_seconds=1.0)
    body = json.dumps(
        {"prompt": "the lazy dog", "stream": True, "n": _CHOICES, "max_tokens": _TOKENS, "logprobs": 1, "seed": 1}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    async with plain_socket(router.server.http_address) as client:
        await asyncio.get_running_loop().sock_sendall(client, head.encode() + b"\r\n\r\n" + body)
        await group.until(lambda: bool(group.submits))
        await is_given_up(router, group)
    await router.generation.Generate(pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=1)))


def _request() -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=_TOKENS, n=_CHOICES, seed=1, logprobs=0)
    return pb.GenerateRequest(text="the lazy dog", sampling=sampling)


@pytest.mark.full  # the next test reaches the same limit
async def test_grpc_over_a_socket_that_is_not_read(start_router: StartRouter) -> None:
    """The client gets no more than the initial window of HTTP/2's flow control; then the stream ends."""
    group = FakeGroup(model=_MODEL, num_blocks=8000, hold_after=_TOKENS - 1)  # else it may have ended by then
    router = await start_router(group, slow_reader_seconds=1.0)
    async with plain_socket(f"127.0.0.1:{router.port}") as client:
        await asyncio.get_running_loop().sock_sendall(client, OPENING + call_frames(1, _request().SerializeToString()))
        await group.until(lambda: bool(group.submits))
        await is_given_up(router, group)
    await router.generation.Generate(pb.GenerateRequest(text="the", sampling=pb.SamplingParams(max_tokens=1)))


async def test_grpc_reader_that_reads_again_gets_the_reason(start_router: StartRouter) -> None:
    """A client that reads again gets the data that was sent, and then a status with the reason."""
    group = FakeGroup(model=_MODEL, num_blocks=8000, hold_after=_TOKENS - 1)  # else it may have ended by then
    router = await start_router(group, slow_reader_seconds=1.0)
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=options) as channel:
        method = channel.unary_stream("/coatcheck.v1.Generation/GenerateStream")  # type: ignore[call-arg]
        call = method(_request().SerializeToString())
        await call.read()
        await is_given_up(router, group)
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was read from this stream for 1 s") as ended:
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("seconds", [0.0, 0.5, float("inf"), float("nan")])
def test_slow_reader_seconds_is_bounded(seconds: float) -> None:
    """A limit that is too short or infinite is refused."""
    with pytest.raises(InvalidConfig, match="slow_reader_seconds"):
        RouterConfig(model="tiny", slow_reader_seconds=seconds)
