"""The routing benchmark: its groups keep their invariants, its runs repeat, and our router beats the plain rules."""

import itertools
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.bench import routing
from coatcheck.bench.routing_simulation.rules import rules
from coatcheck.bench.routing_simulation.service_model import BLOCK, ServiceModel, SimulatedRequest
from coatcheck.bench.routing_simulation.simulated_group import SimulatedGroup
from coatcheck.bench.routing_simulation.simulated_router import SimulatedRouter
from coatcheck.bench.routing_simulation.simulation import OURS, Cell, Cluster, pooled_hits, run, simulate
from coatcheck.bench.routing_simulation.workloads import WORKLOADS, shared_prompt
from coatcheck.bench.setup.public_traces import AZURE
from coatcheck.cluster.benchmark.request_trace import TraceEntry
from tests.examples import examples


def sessions(count: int, turns: int, seed: int = 0) -> list[TraceEntry]:
    """Chats that grow by three blocks a turn below one block that all share; one arrives every 0.4 s."""
    dice = random.Random(seed)
    chains: list[tuple[int, ...]] = [(0,)] * count
    entries = []
    for place in range(count * turns):
        chat = dice.randrange(count)
        chains[chat] += tuple(1000 * place + part + 1 for part in range(3))
        length = len(chains[chat]) * BLOCK + 1
        entries.append(TraceEntry(place * 0.4, length, 100, chains[chat]))
    return entries


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("rule", [*rules(), OURS])
def test_a_run_repeats_itself_and_answers_everything(rule: str, queued: bool) -> None:
    """The same seed gives the same figures to the last bit; every request gets its first token."""
    entries = sessions(12, 5)
    cell = Cell("sessions", 300, 0.7, host_blocks=100)
    first, pooled = run(cell, rules().get(rule), entries, groups=3, queued=queued)
    assert run(cell, rules().get(rule), entries, groups=3, queued=queued) == (first, pooled)
    assert 0 < first.hit_ratio <= 1 and first.imbalance >= 1 and 0 < first.ttft_p50 <= first.ttft_p90 <= first.ttft_p99
    assert math.isfinite(first.ttft_p99)


@pytest.mark.parametrize("load", [pytest.param(0.3, marks=pytest.mark.full), 0.9])
def test_our_router_is_sooner_than_rules_that_do_not_know_prefixes(load: float) -> None:
    """Random and load-only rules give fewer hits and later first tokens, at low and high load, than ours."""
    entries = sessions(40, 12)
    cell = Cell("sessions", 400, load)
    ours, _ = run(cell, None, entries, groups=4)
    shared, _ = run(cell, None, entries, groups=4, routers=2)
    for rule in ("random", "round robin", "least loaded"):
        theirs, _ = run(cell, rules()[rule], entries, groups=4)
        assert max(ours.ttft_p90, shared.ttft_p90) < theirs.ttft_p90, rule
        assert min(ours.hit_ratio, shared.hit_ratio) > theirs.hit_ratio, rule


@pytest.mark.parametrize("load", [0.3, pytest.param(0.5, marks=pytest.mark.full), 0.8])
def test_a_prompt_that_all_share_goes_to_all_groups(load: float) -> None:
    """TTFT p90 is at most 1.1 times the best rule's, and no group does twice the mean work."""
    entries = shared_prompt(0, requests=2500)
    cell = Cell("shared prompt", 3000, load)
    ours, _ = run(cell, None, entries)
    best = min(run(cell, rules()[rule], entries)[0].ttft_p90 for rule in ("round robin", "least loaded", "llm-d"))
    assert ours.ttft_p90 <= 1.1 * best
    assert ours.imbalance < 2 and ours.goodput > 0.99


def test_a_crowded_holder_shares_its_prefix() -> None:
    """With long answers the first groups that hold the shared prompt would answer everybody, in slow steps. Copies
    spread over all groups: TTFT p90 is at most 1.1 times that of round robin, and work is spread evenly."""
    entries = shared_prompt(0, answer=(500, 1500), requests=1500)
    cell = Cell("shared prompt, long answers", 3000, 0.3)
    ours, _ = run(cell, None, entries)
    assert ours.ttft_p90 <= 1.1 * run(cell, rules()["round robin"], entries)[0].ttft_p90
    assert ours.imbalance < 1.3


@pytest.mark.parametrize("routers", [4, pytest.param(16, marks=pytest.mark.full)])
def test_routers_that_do_not_see_each_other_do_not_herd(routers: int) -> None:
    """Routers learn of each other's requests up to 0.1 s later. TTFT p90 with a prompt that all share is below twice
    that of one router, and work is spread evenly."""
    entries = shared_prompt(0, requests=2500)
    cell = Cell("shared prompt", 3000, 0.5)
    one, many = run(cell, None, entries)[0], run(cell, None, entries, routers=routers)[0]
    assert many.ttft_p90 < 2 * one.ttft_p90
    assert many.imbalance < 1.15


@pytest.mark.parametrize("cluster", Cluster)
def test_groups_may_differ_and_change(cluster: Cluster) -> None:
    """Whatever the speeds and sizes of the groups, and while groups drain and join, every request is answered, and no
    group is sent a request while it drains."""
    entries = sessions(12, 8)
    ours, _ = run(Cell("sessions", 300, 0.7, cluster=cluster), None, entries, groups=4)
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
    entries = [TraceEntry(0.0, len(chain) * BLOCK + 1, 1, chain) for chain in chains]
    assert pooled_hits(entries, 3) == [0, BLOCK, 0, BLOCK]
    assert pooled_hits(entries, 9) == [0, BLOCK, 0, 2 * BLOCK]


@pytest.mark.parametrize(
    ("only", "model", "said"),
    [
        ("azur/", {}, "no cell's name begins with 'azur/'; they are workload/blocks/load, conversation/1000/0.3 to "),
        ("azure", {"blocks": 1}, "old.json has other service times; take it away to begin anew"),
        ("azure", asdict(ServiceModel()), "old.json is of 1 router; name another file, or take it away to begin anew"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str, model: dict[str, float], said: str
) -> None:
    """A cell that does not exist, or a file with figures of other groups or routers: one line that says what to
    change."""
    (tmp_path / AZURE).touch()
    (tmp_path / "old.json").write_text(json.dumps({"model": model, "cells": []}))
    with pytest.raises(SystemExit) as ended:
        routing.main(traces=tmp_path, only=only, routers=4, json_path=tmp_path / "old.json")
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith("error: ") and said in printed.err and printed.err.count("\n") == 1


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 600)), min_size=1, max_size=30),
    st.integers(0, 8),
    st.sampled_from([OURS, "random"]),
)
def test_groups_keep_their_invariants(prompts: list[tuple[int, int, int]], host: int, rule: str) -> None:
    """For any requests, blocks are free, cached or held, no answer comes before its request, and in the end the
    router's index equals each group's blocks."""
    model = ServiceModel(blocks=16, host_blocks=host)
    groups = [SimulatedGroup(f"g{place}", model) for place in range(2)]
    router = SimulatedRouter(groups, rules().get(rule), random.Random(1))
    jobs = []
    for place, (family, blocks, output) in enumerate(prompts):
        jobs.append(
            SimulatedRequest(
                place * 0.1, blocks * BLOCK + 7, output, tuple(100 * family + part for part in range(blocks))
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
    held = sum(group.tiers.cached + group.tiers.host_held for group in groups)
    assert router.indexed_entries == held
