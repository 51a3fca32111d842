"""The routing benchmark: its groups keep their invariants, its runs repeat, and our router beats the plain rules."""

import gzip
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.bench.routing_simulation.cells import Cell, Cluster
from coatcheck.bench.routing_simulation.comparison import OURS
from coatcheck.bench.routing_simulation.rules import Groups, Rule, round_robin, rules
from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_index import BlockHolders, ExpectedHolders, match_prefix
from coatcheck.bench.routing_simulation.simulated_router import SimulatedRouter
from coatcheck.bench.routing_simulation.simulation import run, simulate
from coatcheck.bench.routing_simulation.workload import FILES, Part, Workload, load_part
from coatcheck.bench.routing_simulation.workloads import WORKLOADS, shared_prompt
from coatcheck.cluster.benchmark.request_trace import TraceEntry
from tests.bench.sessions import sessions
from tests.examples import examples


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("rule", [*rules(), OURS])
def test_a_run_repeats_itself_and_answers_everything(rule: str, queued: bool) -> None:
    """The same seed gives the same figures to the last bit; every request gets its first token."""
    entries = sessions(12, 5)
    cell = Cell("sessions", 300, 0.7, host_blocks=100)
    first = run(cell, rules().get(rule), entries, groups=3, queued=queued)
    assert run(cell, rules().get(rule), entries, groups=3, queued=queued) == first
    assert 0 < first.hit_ratio <= 1 and first.imbalance >= 1 and 0 < first.ttft_p50 <= first.ttft_p90 <= first.ttft_p99
    assert math.isfinite(first.ttft_p99)


@pytest.mark.parametrize("load", [pytest.param(0.3, marks=pytest.mark.full), 0.9])
def test_our_router_is_sooner_than_rules_that_do_not_know_prefixes(load: float) -> None:
    """Random and load-only rules give fewer hits and later first tokens, at low and high load, than ours."""
    entries = sessions(40, 12)
    cell = Cell("sessions", 400, load)
    ours = run(cell, None, entries, groups=4)
    shared = run(Cell("sessions", 400, load, routers=2), None, entries, groups=4)
    for rule in ("random", "round robin", "least loaded"):
        theirs = run(cell, rules()[rule], entries, groups=4)
        assert max(ours.ttft_p90, shared.ttft_p90) < theirs.ttft_p90, rule
        assert min(ours.hit_ratio, shared.hit_ratio) > theirs.hit_ratio, rule


@pytest.mark.parametrize("load", [0.3, pytest.param(0.5, marks=pytest.mark.full), 0.8])
def test_a_prompt_that_all_share_goes_to_all_groups(load: float) -> None:
    """TTFT p90 is at most 1.1 times the best rule's, and no group does twice the mean work."""
    entries = Workload(shared_prompt(0, requests=2500))
    cell = Cell("shared prompt", 3000, load)
    ours = run(cell, None, entries)
    best = min(run(cell, rules()[rule], entries).ttft_p90 for rule in ("round robin", "least loaded", "llm-d"))
    assert ours.ttft_p90 <= 1.1 * best
    assert ours.imbalance < 2 and ours.goodput > 0.99


def test_a_crowded_holder_shares_its_prefix() -> None:
    """With long answers the first groups that hold the shared prompt would answer everybody, in slow steps. Copies
    spread over all groups: TTFT p90 is at most 1.1 times that of round robin, and work is spread evenly."""
    entries = Workload(shared_prompt(0, answer=(500, 1500), requests=1500))
    cell = Cell("shared prompt, long answers", 3000, 0.3)
    ours = run(cell, None, entries)
    assert ours.ttft_p90 <= 1.1 * run(cell, rules()["round robin"], entries).ttft_p90
    assert ours.imbalance < 1.3


@pytest.mark.parametrize("queued", [False, True])
def test_each_router_runs_a_published_rule_of_its_own(queued: bool) -> None:
    """Round robin's turn is that of one router: of two routers each sends its own requests to the groups in turn."""
    chosen: list[list[str]] = []

    def make() -> Rule:
        rule, names = round_robin(), list[str]()
        chosen.append(names)

        def record(job: SimulatedRequest, groups: Groups, *rest: Any) -> SimulatedGroup:
            group = rule(job, groups, *rest)
            names.append(group.name)
            return group

        return record

    run(Cell("sessions", 400, 0.01, routers=2), make, sessions(6, 3), groups=4, queued=queued)
    assert [len(names) > 0 for names in chosen] == [True, True]
    for names in chosen:
        assert names == [f"g{place % 4}" for place in range(len(names))]


@pytest.mark.parametrize("routers", [4, pytest.param(16, marks=pytest.mark.full)])
def test_routers_that_do_not_see_each_other_do_not_herd(routers: int) -> None:
    """Routers learn of each other's requests up to 0.1 s later. TTFT p90 with a prompt that all share is below twice
    that of one router, and work is spread evenly."""
    entries = Workload(shared_prompt(0, requests=2500))
    one, many = (run(Cell("shared prompt", 3000, 0.5, routers=number), None, entries) for number in (1, routers))
    assert many.ttft_p90 < 2 * one.ttft_p90
    assert many.imbalance < 1.15


@pytest.mark.parametrize("cluster", Cluster)
def test_groups_may_differ_and_change(cluster: Cluster) -> None:
    """Whatever the speeds and sizes of the groups, and while groups drain and join, every request is answered, and no
    group is sent a request while it drains."""
    entries = sessions(12, 8)
    ours = run(Cell("sessions", 300, 0.7, cluster=cluster), None, entries, groups=4)
    assert math.isfinite(ours.ttft_p99) and ours.success == 1.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_trace(name: str) -> None:
    """The same seed gives the same requests, another seed others. Requests come in order of time, about one a second,
    and have a name for each full block of their prompt, so that equal names mean an equal prefix."""
    entries = WORKLOADS[name](1)
    assert entries == WORKLOADS[name](1) != WORKLOADS[name](2)
    assert all(one.at <= other.at for one, other in itertools.pairwise(entries))
    assert 0.5 < len(entries) / entries[-1].at < 2
    before: dict[int, tuple[int, ...]] = {}
    for entry in entries:
        assert entry.output_len >= 1 and len(entry.blocks) == entry.input_len // BLOCK
        for depth, block in enumerate(entry.blocks):
            assert before.setdefault(block, entry.blocks[:depth]) == entry.blocks[:depth]


def test_a_pooled_cache_forgets_the_least_recently_used() -> None:
    """Its hits are an upper bound for any routing. They are counted by hand for a cache of three blocks."""
    chains = [(1, 2), (1, 3), (4,), (1, 2)]
    workload = Workload([TraceEntry(0.0, len(chain) * BLOCK + 1, 1, chain) for chain in chains])
    assert workload.pooled_hits(3) == [0, BLOCK, 0, BLOCK]
    assert workload.pooled_hits(9) == [0, BLOCK, 0, 2 * BLOCK]


def test_the_parts_of_a_workload_have_no_request_in_common(tmp_path: Path) -> None:
    """Of a trace the first third is for tuning and the rest is measured, each from time 0. Made-up workloads have
    another seed."""
    rows = [{"timestamp": 1000 * at, "input_length": 600 + at, "output_length": 1, "hash_ids": [at]} for at in range(9)]
    trace = tmp_path / FILES["synthetic"].removesuffix(".gz")
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / FILES["synthetic"]).write_bytes(gzip.compress(trace.read_bytes()))
    training, measured = (load_part("synthetic", part, tmp_path).entries for part in (Part.TRAINING, Part.MEASURED))
    assert [(entry.at, entry.input_len) for entry in training] == [(0, 600), (1, 601), (2, 602)]
    assert [(entry.at, entry.input_len) for entry in measured] == [(at, 603 + at) for at in range(6)]
    training, measured = (load_part("chats", part, tmp_path).entries for part in (Part.TRAINING, Part.MEASURED))
    assert training != measured[: len(training)]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7), st.sampled_from("dhe")), max_size=20),
    st.integers(0, 6),
)
def test_a_match_ends_at_the_first_block_that_is_nowhere(held: list[tuple[int, int, str]], length: int) -> None:
    """Each group's match counts its blocks on the device, only on the host, and only expected, up to the first block
    that it has in none of the three."""
    chain = [bytes([block]) for block in range(length)]
    holders, expected = BlockHolders(), ExpectedHolders()
    where: dict[str, dict[bytes, int]] = {"d": holders.on_device, "h": holders.on_host, "e": expected.groups}
    for block, groups, tier in held:
        where[tier][bytes([block])] = where[tier].get(bytes([block]), 0) | groups
    matches = match_prefix(chain, 7, holders, expected.groups)
    for bit in (1, 2, 4):
        tiers = [next((tier for tier in "dhe" if where[tier].get(block, 0) & bit), "") for block in chain]
        found = tiers[: tiers.index("")] if "" in tiers else tiers
        assert tuple(matches.get(bit, (0, 0, 0))) == tuple(found.count(tier) for tier in "dhe")


def test_expected_prompts_are_counted_by_block() -> None:
    """A block is expected from a group until all of its prompts with that block are computed."""
    expected = ExpectedHolders()
    expected.add(1, "a", [b"1", b"2"])
    expected.add(2, "b", [b"1"])
    expected.add(1, "c", [b"1"])
    assert expected.groups == {b"1": 3, b"2": 1} and len(expected) == 3
    expected.remove(1, "a")
    assert expected.groups == {b"1": 3}
    expected.remove(1, "c")
    expected.remove(2, "b")
    assert not expected.groups and not len(expected)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 600)), min_size=1, max_size=30),
    st.integers(0, 8),
    st.sampled_from([OURS, "random"]),
)
def test_groups_keep_their_invariants(prompts: list[tuple[int, int, int]], host: int, rule: str) -> None:
    """For any requests, blocks are free, cached or held, the map of holders equals each group's blocks, no answer comes
    before its request, and in the end the router expects no prompt."""
    model = ServiceModel(blocks=16, host_blocks=host)
    holders = BlockHolders()
    groups = [SimulatedGroup(place, model, holders) for place in range(2)]
    router = SimulatedRouter(groups, rules().get(rule), random.Random(1))
    jobs = []
    for place, (family, blocks, output) in enumerate(prompts):
        jobs.append(
            SimulatedRequest(
                place * 0.1, blocks * BLOCK + 7, output, tuple(bytes([family, part]) for part in range(blocks))
            )
        )
    simulate(jobs, groups, router)
    for group in groups:
        group.check()
        assert group.outstanding == 0 and group.tiers.in_use == 0
    for job in jobs:
        assert job.at < job.first_token <= job.ended
        assert job.first_token - job.at >= (job.prompt - job.cached) / model.prefill_rate - 1e-9
    router.check()
