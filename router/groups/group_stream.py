"""GroupStream: one Attach stream to a group, from its beginning to its end.

It also detects a silent group. gRPC reports no error for one: a lost host closes no TCP connection, and a suspended
process keeps its connections. A new TCP connection tells the two apart: a host's kernel accepts connections for a
process that is suspended, and a lost host accepts none.
"""

import asyncio
import errno
from collections.abc import Callable
from typing import Final, TypeAlias

import grpc

from coatcheck.proto.host_port import bare_host
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

# How long a host may take to accept a connection. The kernel accepts connections however busy the processes are. In
# this time TCP sends the first packet three times.
_CONNECT_SECONDS: Final = 4.0
# The errors of a connection attempt to a host that is lost, or on which no process listens at the port.
_UNREACHABLE: Final = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)

_Call: TypeAlias = "grpc.aio.StreamStreamCall[ToGroup, FromGroup]"


class GroupSilent(Exception):
    """The group has sent nothing for too long. The message says for how long."""


class GroupStream:
    """Create it inside an event loop, and call `read` once. The seconds are those of RouterConfig."""

    def __init__(
        self,
        endpoint: GroupEndpoint,
        certificate: ClusterCertificate | None,
        silence_seconds: float,
        hang_seconds: float,
    ) -> None:
        self._endpoint = endpoint
        self._certificate = certificate
        self._silence_seconds = silence_seconds
        self._hang_seconds = hang_seconds
        self._reason = ""  # the message of GroupSilent, set when the stream is cancelled for it
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
                _raise_if_cancelled()
            except asyncio.CancelledError:
                if _is_task_cancelled():  # close() was called, perhaps at the same moment
                    raise
                raise GroupSilent(self._reason) from None
            except grpc.aio.AioRpcError:
                _raise_if_cancelled()
                raise
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
        check_seconds = self._silence_seconds / 5
        while not self._reason:
            before = clock()
            await asyncio.sleep(check_seconds)
            busy = clock() - before - check_seconds  # seconds in which this router could not read messages
            last_message_at = self._last_message_at
            silence = clock() - last_message_at - busy
            if silence > self._hang_seconds:
                self._reason = f"the group has sent nothing for {self._hang_seconds:g} s"
            elif (
                silence > self._silence_seconds
                and not await self._accepts_connection()
                and self._last_message_at == last_message_at  # no message has come during the attempt to connect
            ):
                seconds = f"{self._silence_seconds:g} s"
                self._reason = f"the group has sent nothing for {seconds}, and its host accepts no connection"
        call.cancel()

    async def _accepts_connection(self) -> bool:
        """False if the group's host accepts no connection. True also if this router could not find out, because it was
        too busy or has no free file descriptor."""
        clock = asyncio.get_running_loop().time
        host, _, port = self._endpoint.address.rpartition(":")
        began = clock()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(bare_host(host), int(port))
        except TimeoutError:
            return clock() - began > 1.5 * _CONNECT_SECONDS  # this router was too busy to read the reply
        except OSError as error:
            # asyncio raises an error without errno if each of several addresses of the host has failed.
            return error.errno is not None and error.errno not in _UNREACHABLE
        writer.close()
        return True


def _raise_if_cancelled() -> None:
    """Raises CancelledError if somebody has cancelled the current task. gRPC swallows a cancellation that arrives while
    it sets up a call; the call then fails or ends later."""
    if _is_task_cancelled():
        raise asyncio.CancelledError from None


def _is_task_cancelled() -> bool:
    """Whether somebody has cancelled the current task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
