"""Routers end with the supervisor's list of groups, whatever is lost, repeated, overtaken or restarted on the way."""

import asyncio
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList, make_endpoint
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups import group_registry
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import NO_LIST, GroupListUpdate, GroupListVersion
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.workers.core.rank_progress import RankProgress
from tests.examples import examples


def update_of(pickled: bytes | None) -> GroupListUpdate:
    assert pickled is not None
    update: GroupListUpdate = pickle.loads(pickled)
    return update


def serving(*names: str) -> list[GroupState]:
    return [GroupState(name, "serving", f"{name}:1") for name in names]


def test_a_router_gets_the_list_once_and_then_changes() -> None:
    """The first update is whole; the next has the changed and added groups and the names of the removed ones, since the
    version that the router holds. A router that holds the list gets nothing."""
    groups = VersionedGroupList(epoch=7)
    assert groups.update_for(NO_LIST) is None, "the groups are not known yet"
    first = serving("a", "b", "c")
    assert groups.set_states(first)
    whole = update_of(groups.update_for(NO_LIST))
    assert (whole.base, [endpoint.name for endpoint in whole.endpoints]) == (None, ["a", "b", "c"])
    assert groups.update_for(whole.version) is None
    lost = GroupState("b", "lost", reason="it was killed")
    groups.set_states([first[0], lost, first[2]])
    groups.set_states([first[0], lost, *serving("d")])
    change = update_of(groups.update_for(whole.version))
    assert change.base == whole.version.number and change.version == groups.version == GroupListVersion(7, 3)
    assert {endpoint.name: endpoint.state for endpoint in change.endpoints} == {"b": "lost", "d": "serving"}
    assert change.removed == ("c",)
    assert update_of(groups.update_for(GroupListVersion(6, 9))).base is None, "another supervisor's list is replaced"


def test_what_routers_need_not_know_is_no_change() -> None:
    """The progress of a group's ranks changes no version. An empty list of groups is a list."""
    groups = VersionedGroupList()
    (state,) = serving("a")
    groups.set_states([state])
    before = groups.version
    assert not groups.set_states([replace(state, ranks=(RankProgress(),))]) and groups.version == before
    empty = VersionedGroupList()
    assert empty.set_states([]) and update_of(empty.update_for(NO_LIST)).endpoints == ()


def test_a_change_is_pickled_once() -> None:
    """All routers that hold the same version get the same bytes, and one group of a thousand takes few of them."""
    groups = VersionedGroupList()
    states = serving(*(f"group-{number}" for number in range(1000)))
    groups.set_states(states)
    before = groups.version
    groups.set_states([replace(states[0], state="lost", address=""), *states[1:]])
    change = groups.update_for(before)
    assert change is groups.update_for(before) is not None
    assert len(change or b"") < 1000 < 10_000 < len(groups.update_for(NO_LIST) or b"")


def test_a_later_supervisor_has_a_higher_epoch() -> None:
    """The epoch is the time of the start. If the clock went back, the list takes an epoch above that of the router."""
    before = time.time_ns()
    groups = VersionedGroupList()
    groups.set_states([])
    assert before <= groups.version.epoch <= time.time_ns()
    ahead = GroupListVersion(groups.version.epoch + 10**15, 5)
    assert update_of(groups.update_for(ahead)).version > ahead


class OfflineConnection:
    """Stands in for a GroupConnection. It never attaches."""

    def __init__(self, endpoint: GroupEndpoint, *_: object, **__: object) -> None:
        self.endpoint = endpoint
        self.is_attached = False

    async def close(self, reason: str) -> None: ...

    def end_ejection_pause(self) -> None: ...


class Router:
    """A router's own list, and what the supervisor believes that the router holds."""

    def __init__(self) -> None:
        self.registry = GroupRegistry(RouterConfig("m"))
        self.held = NO_LIST

    @property
    def groups(self) -> dict[str, GroupEndpoint]:
        registry = self.registry
        endpoints = [*(link.endpoint for link in registry.connections), *registry.without_address]
        assert len({endpoint.name for endpoint in endpoints}) == len(endpoints), "a group is listed once"
        return {endpoint.name: endpoint for endpoint in endpoints}


class Cluster:
    """A supervisor, two routers, and a network that loses, repeats and reorders updates and their answers."""

    def __init__(self) -> None:
        self.clock = 10**9
        self.states: dict[str, GroupState] = {"g0": GroupState("g0")}
        self.routers = [Router(), Router()]
        self.in_flight: list[tuple[Router, bytes]] = []
        self.supervisor = VersionedGroupList(self.clock)
        self.supervisor.set_states(list(self.states.values()))

    def change(self, name: str, state: str, port: int) -> None:
        """Add or change a group, or remove it."""
        if state == "removed":
            self.states.pop(name, None)
        else:
            address = f"h:{port}" if state in ("serving", "draining") else ""
            self.states[name] = GroupState(name, state, address, reason=f"change {port}")
        self.supervisor.set_states(list(self.states.values()))

    def restart_supervisor(self, clock_step: int) -> None:
        """The next supervisor knows the groups and no router's version. Its clock may have been set back."""
        self.clock += clock_step
        self.supervisor = VersionedGroupList(self.clock)
        self.supervisor.set_states(list(self.states.values()))
        for router in self.routers:
            router.held = NO_LIST

    def restart_router(self, index: int) -> None:
        self.routers[index] = Router()

    def send(self, index: int) -> None:
        router = self.routers[index]
        if (update := self.supervisor.update_for(router.held)) is not None:
            self.in_flight.append((router, update))

    async def deliver(self, index: int, *, is_repeated: bool, is_answered: bool) -> None:
        """Deliver one of the updates in flight, not necessarily the oldest. The answer may be lost."""
        if not self.in_flight:
            return
        router, update = self.in_flight[index % len(self.in_flight)]
        if not is_repeated:
            self.in_flight.remove((router, update))
        held = await router.registry.apply_update(update_of(update))
        if is_answered:
            router.held = held

    def report(self, index: int) -> None:
        """A router's regular report."""
        self.routers[index].held = self.routers[index].registry.version

    async def settle(self) -> None:
        """Everything in flight is lost. Each router reports, and gets what it lacks, until none lacks anything."""
        self.in_flight.clear()
        for _ in range(4):
            for index in range(len(self.routers)):
                self.report(index)
                self.send(index)
                await self.deliver(0, is_repeated=False, is_answered=True)


ACTIONS = st.one_of(
    st.tuples(
        st.just("change"),
        st.sampled_from(["g0", "g1", "g2"]),
        st.sampled_from(["starting", "serving", "draining", "lost", "failed", "removed"]),
        st.integers(1, 3),
    ),
    st.tuples(st.just("send"), st.integers(0, 1)),
    st.tuples(st.just("deliver"), st.integers(0, 7), st.booleans(), st.booleans()),
    st.tuples(st.just("report"), st.integers(0, 1)),
    st.tuples(st.just("restart_router"), st.integers(0, 1)),
    st.tuples(st.just("restart_supervisor"), st.sampled_from([-700, -50, 30, 1100])),
)


async def follow(actions: Sequence[tuple[object, ...]]) -> None:
    cluster = Cluster()
    for kind, *arguments in actions:
        if kind == "deliver":
            index, is_repeated, is_answered = arguments
            await cluster.deliver(int(str(index)), is_repeated=bool(is_repeated), is_answered=bool(is_answered))
        else:
            getattr(cluster, str(kind))(*arguments)
    await cluster.settle()
    expected = {name: make_endpoint(state) for name, state in cluster.states.items()}
    for router in cluster.routers:
        assert router.groups == expected
        assert router.registry.version == cluster.supervisor.version


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_every_router_ends_with_the_list_of_the_supervisor(actions: Sequence[tuple[object, ...]]) -> None:
    """Changes, losses, repetitions, updates that overtake each other, lost answers, restarts of routers and of the
    supervisor, also with a clock that was set back: once every router has reported, all lists are equal."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(group_registry, "GroupConnection", OfflineConnection)
        asyncio.run(follow(actions))
