"""OutlierDetection: which groups are ejected because they are slow, for how long, and when they attach again."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import StatusRequest
from coatcheck.proto.stubs.worker_pb2 import FromGroup
from coatcheck.router.groups import group_connection
from coatcheck.router.groups.outlier_detection import OutlierDetection
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask, undisturbed


@pytest.mark.parametrize(
    ("slowness", "peers", "slow"),
    [
        (5.0, [1.0], True),
        (4.9, [1.0], False),
        (50.0, [], False),  # there is no other group
        (10.0, [9.0], False),  # the same cause slows all groups
        (10.0, [1.0, 9.0], True),  # one peer is not slow
        (10.0, [9.0, 9.0, 1.0], False),  # most peers are slow
        (5.0, [0.0, 0.1], True),  # factors below 1 count as 1
    ],
)
def test_slow_is_far_beyond_its_own_past_and_its_peers(slowness: float, peers: list[float], slow: bool) -> None:
    """A group is slow at five times its usual step time and five times the lower median of its peers' factors."""
    ejected = OutlierDetection().detect("g", slowness, peers, 0.0)
    assert (ejected is not None) == slow
    if ejected is not None:
        assert f"{slowness:.1f} times as long as they used to, those of the groups beside it 1.0" in str(ejected)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=12))
def test_the_fastest_group_stays(slowness: list[float]) -> None:
    """For any factors and any order of checks, the fastest group is not ejected."""
    detection = OutlierDetection()
    left = dict(enumerate(slowness))
    for name, value in list(left.items()) * 3:
        peers = [other for key, other in left.items() if key != name]
        if name in left and detection.detect(str(name), value, peers, 0.0) is not None:
            del left[name]
    assert min(slowness) in left.values()


def test_pauses_double_and_are_forgotten() -> None:
    """Each pause is twice the last one, up to eight minutes. An hour after the end of a pause, the next one is 30 s
    again."""
    detection, now, pauses = OutlierDetection(), 0.0, []
    for _ in range(6):
        ejected = detection.detect("g", 9.0, [1.0], now)
        assert ejected is not None
        pauses.append(ejected.pause)
        now += ejected.pause + 20
    assert pauses == [30, 60, 120, 240, 480, 480]
    first = detection.detect("g", 9.0, [1.0], now + 3600)
    other = detection.detect("other", 9.0, [1.0], now)
    assert first is not None and other is not None and first.pause == other.pause == 30


async def test_a_slow_group_is_ejected_until_it_is_needed(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream moves without a gap, its status has the reason, and new requests go to the other group. When the other
    group is lost, the slow one attaches before its pause ends; alone it is not ejected again."""
    monkeypatch.setattr(group_connection, "_LONGEST_BACKOFF", 0.05)
    _, ids = await undisturbed(start_router, ask())
    groups = {name: FakeGroup(name, hold_after=6) for name in ("a", "b")}
    router = await start_router(*groups.values())
    stream = Stream(router, ask())
    slow = groups.pop((await stream.read()).started.group)
    ((_, other),) = groups.items()
    while len(stream.ids[0]) < 6:
        await stream.read()
    other.go()
    slow.load.status.running, slow.load.status.slowness = 1, 12.0
    slow.send(FromGroup(load=slow.load))
    assert (await stream.finish()).final.moves == 1
    assert stream.ids == ids
    states = {group.name: group for group in (await router.admin.Status(StatusRequest())).groups}
    assert states[slow.name].state == "lost" and states[other.name].state == "serving"
    assert "steps take 12.0 times as long as they used to" in states[slow.name].reason
    assert (await router.generation.Generate(ask())).final.group == other.name
    slow.go()
    await other.kill()
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while [connection.name for connection in router.server.groups.serving()] != [slow.name]:
            await router.server.groups.next_change.wait()
    slow.send(FromGroup(load=slow.load))
    assert (await router.generation.Generate(ask())).final.group == slow.name
    (status,) = [group for group in (await router.admin.Status(StatusRequest())).groups if group.name == slow.name]
    assert "ejections: 1, the last for: its steps take 12.0 times" in status.reason
