"""kill -9 of every kind of process under every kind of stream: clients get what an undisturbed run gives."""

import asyncio
import random

import pytest

from coatcheck.bench.failure_cases.chaos_cluster import ChaosCluster
from coatcheck.bench.failure_cases.chaos_load import ChaosLoad, cases
from coatcheck.bench.failure_cases.chaos_strike import Striker
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from tests.cluster.running_server import coatcheck, until
from tests.cluster.serving import kill

pytestmark = pytest.mark.ray

# Half of them amid a prefill, a restore or another failover, which is a kill of its own. Other tests kill the processes
# of the second list one by one.
_STRIKES = [("node", "failover"), ("stop", "any")]
_MORE_STRIKES = [
    ("router", "prefill"),
    ("supervisor", "failover"),
    ("serve", "any"),
    ("rank 0", "restore"),
    ("group", "any"),
]


@pytest.mark.full  # test_serve.py restarts one group
async def test_a_rolling_restart_loses_nothing(cluster: ChaosCluster) -> None:
    """`coatcheck restart` under load: no request is refused, fails or changes."""
    before = {rank.pid for group in cluster.serving() for rank in group.ranks}
    load = ChaosLoad(cluster.address, cases(600, tokens=60))
    await load.learn()
    keeping = asyncio.create_task(load.keep_streams(3))
    try:
        flags = ["--ray-address", cluster.ray_address, "--drain-seconds", "2"]
        done = await asyncio.to_thread(
            coatcheck, "restart", *flags, environment=cluster.environment, seconds=3 * MAX_WAIT_SECONDS
        )
    finally:
        load.stop()
        await keeping
        await load.close()
    assert done.returncode == 0, done.stderr
    said = [line.partition(" serves again")[0] for line in done.stdout.splitlines()]
    assert said == ["the supervisor", "group-0", "group-1"]
    assert not load.faults and not load.counts["refused"] and load.counts["started"] == load.counts["ended"]
    await asyncio.to_thread(cluster.wait_whole, MAX_WAIT_SECONDS)
    assert not before & {rank.pid for group in cluster.serving() for rank in group.ranks}


@pytest.mark.parametrize("strikes", [_STRIKES, pytest.param(_MORE_STRIKES, marks=pytest.mark.full)])
async def test_no_stream_ends_or_changes_whatever_is_killed(
    cluster: ChaosCluster, strikes: list[tuple[str, str]]
) -> None:
    """Each kind of process is killed or suspended amid streams: all streams end with the expected ids, text and
    logprobs."""
    load = ChaosLoad(cluster.address, cases(600, tokens=60))
    await load.learn()
    striker = Striker(cluster, load, random.Random(7))
    keeping = asyncio.create_task(load.keep_streams(3))
    try:
        struck = [strike for kind, moment in strikes for strike in await striker.strike(kind, moment)]
    finally:
        load.stop()
        await keeping
        await load.close()
    assert not load.faults
    assert load.counts["started"] == load.counts["ended"] and load.counts["moved"] > 0
    assert {strike.kind for strike in struck} == {kind for kind, _ in strikes} | {"rank"}  # which begins a failover
    assert {kind for kind, _ in _STRIKES + _MORE_STRIKES} | {"rank"} == set(cluster.kinds) - {"fault"}
    assert bool(striker.found) == ("stop" in dict(strikes))  # bench/chaos.py measures how soon


@pytest.mark.full  # half a minute for each: a group has to come first
async def test_no_stream_ends_or_changes_while_groups_come_and_go(cluster: ChaosCluster) -> None:
    """Ranks and the supervisor are killed while a group is added, removed and drained, and a rank crashes by itself."""
    load = ChaosLoad(cluster.address, cases(600, tokens=60))
    await load.learn()
    striker = Striker(cluster, load, random.Random(11))
    keeping = asyncio.create_task(load.keep_streams(3))
    strikes = [("rank 0", "scale out"), ("supervisor", "scale in"), ("fault", "scale in"), ("group", "drain")]
    try:
        for kind, moment in strikes:
            await striker.strike(kind, moment)
    finally:
        load.stop()
        await keeping
        await load.close()
    assert not load.faults and load.counts["started"] == load.counts["ended"] > 0


@pytest.mark.full
def test_restarts_outlive_the_supervisor(cluster: ChaosCluster) -> None:
    """The supervisor and a whole group are killed together: the new supervisor continues the group's count of
    restarts."""
    cluster.wait_whole(MAX_WAIT_SECONDS)
    before = _group_0(cluster)
    for pid in [*cluster.pids("supervisor"), *(rank.pid for rank in before.ranks)]:
        kill(pid)
    until(lambda: _group_0(cluster).restarts > before.restarts, "the group is started again")
    cluster.wait_whole(MAX_WAIT_SECONDS)
    assert _group_0(cluster).ranks[0].pid != before.ranks[0].pid


def _group_0(cluster: ChaosCluster) -> pb.GroupStatus:
    status = cluster.status()
    return (
        next((group for group in status.groups if group.name == "group-0"), pb.GroupStatus())
        if status
        else pb.GroupStatus()
    )
