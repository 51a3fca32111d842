"""RouterUnderTest: a started router in front of fake groups, with a client's gRPC stubs."""

from collections.abc import Awaitable, Callable, Sequence

import grpc

from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub
from coatcheck.router.server import Router
from tests.router.fake_group import FakeGroup


class RouterUnderTest:
    """`server` is the Router itself, `groups` are the fake groups behind it."""

    def __init__(self, server: Router, address: str, groups: Sequence[FakeGroup]) -> None:
        self.server = server
        self.port = int(address.rpartition(":")[2])
        self.groups = list(groups)
        self.channel = grpc.aio.insecure_channel(address)
        self.generation = GenerationStub(self.channel)
        self.admin = AdminStub(self.channel)

    async def wait_for_groups(self, count: int) -> None:
        """Waits until `count` groups serve."""
        while len(self.server.groups.serving()) != count:
            await self.server.groups.next_change.wait()

    async def close(self) -> None:
        """Closes the clients, the router and its groups."""
        await self.channel.close()  # type: ignore[call-arg]
        await self.server.stop()
        for group in self.groups:
            await group.kill()


StartRouter = Callable[..., Awaitable[RouterUnderTest]]
