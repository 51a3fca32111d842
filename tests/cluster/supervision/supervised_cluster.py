"""SupervisedCluster: a supervisor of fake ranks and fake routers, without Ray."""

import asyncio

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.supervision.supervisor import Supervisor
from tests.cluster.supervision.fake_ranks import FakeRanks
from tests.cluster.supervision.fake_router_actor import FakeRouterActor

NODES = [("node", {"CPU": 6.0})]


class Cluster:
    """A supervisor of two groups, and the fakes that it has started."""

    def __init__(self) -> None:
        self.ranks: dict[str, FakeRanks] = {}
        self.router: FakeRouterActor
        self.numbers: dict[str, int] = {}  # Ray's key-value store
        self.texts: dict[str, str] = {}  # the same store
        self.placed: set[str] = set()  # groups that have a placement group
        self.supervisor: Supervisor

    async def states(self) -> dict[str, str]:
        return {group.name: group.state for group in (await self.supervisor.get_state()).groups}

    async def until_serving(self) -> None:
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not (await self.supervisor.get_state()).is_ready:  # noqa: ASYNC110  # the state has no event
                await asyncio.sleep(0.01)

    async def until(self, group: str, state: str) -> None:
        """Wait until the group has this state."""
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while (await self.states()).get(group) != state:  # noqa: ASYNC110  # the state has no event
                await asyncio.sleep(0.01)
