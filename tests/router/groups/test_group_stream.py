"""The end of a stream to a group."""

import asyncio
import socket
from types import SimpleNamespace

import grpc
import pytest

from coatcheck.proto.stubs.worker_pb2 import FromGroup, ToGroup
from coatcheck.router.groups import group_stream
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_stream import GroupStream


def _ignore(message: FromGroup) -> None:
    """Receives what a group sends."""


async def test_a_cancelled_stream_ends_while_no_group_listens() -> None:
    """A stream that is cancelled while it cannot connect is cancelled. gRPC swallows some cancellations then, and a
    connection that did not end would keep the router from the group's new address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cancelled = 0
    for attempt in range(400):
        stream = GroupStream(GroupEndpoint("group-0", f"127.0.0.1:{port}"), None, 4.0, 15.0)
        stream.send(ToGroup())
        reading = asyncio.create_task(stream.read(_ignore))
        await asyncio.sleep(attempt % 40 * 1e-4)
        if reading.done():
            with pytest.raises(grpc.aio.AioRpcError):
                reading.result()
            continue
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        cancelled += 1
    assert cancelled


async def test_a_cancelled_stream_that_ends_without_an_error_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC swallows a cancellation and ends the stream as if the group had ended it: the reader is cancelled."""

    class Call:
        async def read(self) -> object:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return object()  # as EOF
            raise AssertionError("an Event that nobody sets")

        async def write(self, message: ToGroup) -> None:
            """Sends nothing."""

        def cancel(self) -> bool:
            return False

    begun = asyncio.Event()
    monkeypatch.setattr(group_stream, "WorkerStub", lambda channel: SimpleNamespace(Attach=Call))
    stream = GroupStream(GroupEndpoint("group-0", "127.0.0.1:1"), None, 4.0, 15.0)
    reading = asyncio.create_task(stream.read(_ignore))
    await begun.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
