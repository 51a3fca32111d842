"""A started router in front of fake groups, with a client's stubs."""

from collections.abc import Awaitable, Callable

import grpc

from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub
from coatcheck.router.server import Router
from tests.router.fake_group import FakeGroup


class Door:
    """A started router, a client's stubs, and the groups behind it."""

    def __init__(self, router: Router, address: str, groups: list[FakeGroup]) -> None:
        channel = grpc.aio.insecure_channel(address)
        self.router = router
        self.port = int(address.rpartition(":")[2])
        self.channel = channel
        self.groups = groups
        self.generation = GenerationStub(channel)
        self.admin = AdminStub(channel)

    async def serving(self, count: int) -> None:
        """Waits until that many groups are attached."""
        while len(self.router.groups.serving()) != count:
            await self.router.groups.next_change.wait()


OpenDoor = Callable[..., Awaitable[Door]]
