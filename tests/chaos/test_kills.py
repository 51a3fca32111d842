"""kill -9 of everything under streams of every kind: what a client gets is what an undisturbed run gives."""

import asyncio
import random

import pytest

from coatcheck.bench.chaos_cluster import ChaosCluster
from coatcheck.bench.chaos_load import ChaosLoad, cases
from coatcheck.bench.chaos_strike import Striker
from coatcheck.proto import coatcheck_pb2 as pb
from tests.cluster.serving import kill, until

# Each kind once, about half of them amid a prefill or another failover.
_STRIKES = [
    ("rank", "prefill"),
    ("supervisor", "failover"),
    ("stop", "any"),
    ("rank 0", "failover"),
    ("router", "prefill"),
    ("serve", "any"),
    ("group", "any"),
]


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_no_stream_ends_or_changes_whatever_is_killed(cluster: ChaosCluster) -> None:
    """Each kind of process is killed or stopped amid streams: all end, with the ids, text and logprobs expected."""
    load = ChaosLoad(cluster.address, cases(600, tokens=100))
    striker = Striker(cluster, load, random.Random(7))
    await load.learn()
    keeping = asyncio.create_task(load.keep(3))
    try:
        for kind, moment in _STRIKES:
            await striker.strike(kind, moment)
    finally:
        load.stop()
        await keeping
        await load.close()
    assert not load.faults
    assert load.counts["started"] == load.counts["ended"] and load.counts["moved"] > 0
    assert max(striker.found) < 5.0


@pytest.mark.full
@pytest.mark.timeout(300)
def test_restarts_outlive_the_supervisor(cluster: ChaosCluster) -> None:
    """The supervisor and a whole group are killed together: the next supervisor counts on from where the group was."""
    cluster.wait_whole(60.0)
    before = _group_0(cluster)
    for pid in [*cluster.actors("Supervisor"), *(rank.pid for rank in before.ranks)]:
        kill(pid)
    until(lambda: _group_0(cluster).restarts > before.restarts, "the group is started again")
    cluster.wait_whole(60.0)
    assert _group_0(cluster).ranks[0].pid != before.ranks[0].pid


def _group_0(cluster: ChaosCluster) -> pb.GroupStatus:
    status = cluster.status()
    return (
        next((group for group in status.groups if group.name == "group-0"), pb.GroupStatus())
        if status
        else pb.GroupStatus()
    )
