"""Routers and groups of different versions work together if their contracts are equal, and refuse each other if not."""

import asyncio

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.contract import CONTRACT, VERSION, contract_mismatch
from coatcheck.proto.stubs.coatcheck_pb2 import StatusRequest
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed


async def test_a_stream_moves_between_versions(start_router: StartRouter) -> None:
    """With equal contracts a stream continues on a group of another version, and the status shows the versions."""
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=6) for name in ("a", "b")}
    groups["a"].version, groups["b"].version = "0.0.9", "9.9.9"
    router = await start_router(*groups.values())
    status = await router.admin.Status(StatusRequest())
    assert [group.version for group in status.groups] == ["0.0.9", "9.9.9"] and status.version == VERSION
    stream = Stream(router, ask())
    first = groups.pop((await stream.read()).started.group)
    while len(stream.ids[0]) < 6:
        await stream.read()
    (second,) = groups.values()
    second.go()
    await first.kill()
    assert (await stream.finish()).final.group == second.name and stream.ids == ids


async def test_a_group_of_another_contract_is_refused(start_router: StartRouter) -> None:
    """The group does not serve, its status names the versions and what to do, and other groups serve on."""
    known, strange = FakeGroup("known"), FakeGroup("strange")
    strange.contract, strange.version = CONTRACT + 1, "9.9.9"
    router = await start_router()
    router.groups += [known, strange]
    await router.server.set_groups([await known.start(), await strange.start()])
    await router.wait_for_groups(1)
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while (status := (await router.admin.Status(StatusRequest())).groups[1]).state == "starting":
            pass  # it is still being asked
    assert status.state == "lost" and status.reason == contract_mismatch("the group", CONTRACT + 1, "9.9.9")
    assert f"coatcheck 9.9.9 with contract {CONTRACT + 1}" in status.reason
    assert "install one version on every node" in status.reason
    await router.generation.Generate(ask())
    assert len(known.submits) == 1 and not strange.submits
