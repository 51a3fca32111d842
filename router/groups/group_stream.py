"""GroupStream: one Attach stream to a group, from its beginning to its end.

It also detects a silent group: a stopped process keeps its TCP connections, so gRPC reports no error.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import grpc

from coatcheck.proto.internal_tls import ClusterCertificate, internal_channel
from coatcheck.proto.stubs.worker_pb2 import FromGroup, ToGroup
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub
from coatcheck.router.config import GROUP_MESSAGE_BYTES
from coatcheck.router.groups.group_endpoint import GroupEndpoint

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", GROUP_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", GROUP_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else a new stream inherits the backoff of the last one
]

_Call: TypeAlias = "grpc.aio.StreamStreamCall[ToGroup, FromGroup]"


class GroupSilent(Exception):
    """The group has sent nothing for too long."""


class GroupStream:
    """Create it inside an event loop, and call `read` once."""

    def __init__(self, endpoint: GroupEndpoint, certificate: ClusterCertificate | None, silence_seconds: float) -> None:
        self._endpoint = endpoint
        self._certificate = certificate
        self._silence_seconds = silence_seconds
        self._outbox: asyncio.Queue[ToGroup] = asyncio.Queue()
        self._last_message_at = 0.0

    def send(self, message: ToGroup) -> None:
        """Queues a message; it is dropped if the stream ends first."""
        self._outbox.put_nowait(message)

    async def read(self, receive: Callable[[FromGroup], None]) -> None:
        """Calls `receive` with each message until the group ends the stream. Raises AioRpcError if the stream breaks,
        GroupSilent, and whatever `receive` raises."""
        async with internal_channel(self._endpoint.address, self._certificate, _CHANNEL_OPTIONS) as channel:
            call: _Call = WorkerStub(channel).Attach()  # type: ignore[no-untyped-call]  # made by protoc
            clock = asyncio.get_running_loop().time
            self._last_message_at = clock()
            helpers = [
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._watch(call), name=f"watch over {self._endpoint.name}"),
            ]
            try:
                while isinstance(message := await call.read(), FromGroup):  # anything else is EOF
                    self._last_message_at = clock()
                    receive(message)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # close() was called, perhaps at the same moment
                    raise
                raise GroupSilent from None
            finally:
                for helper in helpers:
                    helper.cancel()
                call.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    async def _write(self, call: _Call) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _watch(self, call: _Call) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            before = clock()
            await asyncio.sleep(self._silence_seconds / 5)
            late = clock() - before - self._silence_seconds / 5  # this router was too busy to read
            if clock() - self._last_message_at - late > self._silence_seconds:
                call.cancel()
                return
