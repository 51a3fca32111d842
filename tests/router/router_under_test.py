"""RouterUnderTest: a started router in front of fake groups, with a client's gRPC stubs."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub
from coatcheck.router.config import RouterConfig
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
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


_Kind = TypeVar("_Kind", bound=RouterUnderTest)


async def launch_router(
    kind: type[_Kind], tokenizer: TokenizerJson | None, groups: Sequence[FakeGroup], **settings: object
) -> _Kind:
    """Starts the groups and a router in front of them. Without a `tokenizer` the router reads its model's files."""
    # Unlike real groups, fake ones send no reports by themselves: on a busy machine they would seem to hang.
    settings = {"model": "tiny", "hang_seconds": 60.0, "cause_wait_seconds": 0.05, **settings}
    server = Router(RouterConfig(**settings), tokenizer)  # type: ignore[arg-type]  # by name
    router = kind(server, await server.start(), groups)
    await server.set_groups([await group.start() for group in groups])
    return router


StartRouter = Callable[..., Awaitable[RouterUnderTest]]
