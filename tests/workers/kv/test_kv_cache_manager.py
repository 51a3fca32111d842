"""The engine with two tiers, over a fake model that reads its KV back and copies that take several steps."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.proto.retention import Retention
from tests.examples import examples
from tests.workers.collector import Collector, request
from tests.workers.fake_runner import answer, next_token
from tests.workers.kv.two_tier_engine import ask, make_engine


@pytest.mark.parametrize(("depth", "delays"), [(0, [0]), (1, [0]), (1, [0, 1, 5])])
def test_an_evicted_prefix_comes_back_from_the_host(depth: int, delays: list[int]) -> None:
    """An evicted prompt is restored from the host tier, and only its last tokens are computed."""
    engine, runner = make_engine(depth=depth, delays=delays)
    prompt = list(range(1, 42))
    ask(engine, "first", prompt)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    assert runner.demoted >= 10
    computed = runner.computed
    done = ask(engine, "again", prompt)
    assert done.tokens["again", 0] == answer(prompt, 4, seed=7)
    assert (done.first["again", 0].cached_device_tokens, done.first["again", 0].cached_host_tokens) == (0, 40)
    assert runner.computed - computed <= 1 + 3
    assert runner.restored == 10


@settings(max_examples=examples(30), deadline=None)
@given(
    data=st.data(),
    depth=st.integers(0, 1),
    num_blocks=st.integers(12, 30),
    host_blocks=st.integers(1, 40),
    delays=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_any_mix_is_answered_exactly(
    data: st.DataObject, depth: int, num_blocks: int, host_blocks: int, delays: list[int]
) -> None:
    """Demotions, restores, corrupt blocks, aborts, preemptions, retention and slow copies, of any tenant and in any
    order, change no answer and lose no block."""
    engine, runner = make_engine(num_blocks, host_blocks, depth=depth, delays=delays, seqs=data.draw(st.integers(1, 6)))
    collector = Collector(engine)
    stems = [[5] * 9, [6] * 14, [5] * 4 + [7] * 18, list(range(1, 25))]
    wanted: dict[tuple[str, int], list[int]] = {}
    for i in range(data.draw(st.integers(1, 14))):
        prompt = data.draw(st.sampled_from(stems)) + data.draw(st.lists(st.integers(1, 9), max_size=5))
        n, limit = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 14))
        for choice in range(n):
            wanted[f"r{i}", choice] = answer(prompt, limit, choice, 7)
        salt, priority = data.draw(st.sampled_from(["", "a"])), data.draw(st.integers(0, 1))
        retention = data.draw(st.none() | st.builds(Retention, st.sampled_from([0, 50]), st.sampled_from([0.01, 9.0])))
        asked = request(f"r{i}", prompt, limit, n=n, salt=salt, priority=priority)
        engine.submit_request(
            dataclasses.replace(asked, retention=retention, tenant=data.draw(st.sampled_from(["", "t"])))
        )
        runner.seconds["demote"] = data.draw(st.sampled_from([1e-6, 1e-6, 10.0]))
        runner.seconds["restore"] = data.draw(st.sampled_from([1e-6, 1e-6, 10.0]))
        for _ in range(data.draw(st.integers(0, 12))):
            collector.step()
        event = data.draw(st.integers(0, 5))
        if event == 0:
            engine.abort_request(*data.draw(st.sampled_from(sorted(wanted))))
            engine.check()
        elif event == 1 and runner.host:
            runner.broken.add(data.draw(st.sampled_from(sorted(runner.host))))
    collector.run()
    for key, tokens in wanted.items():
        said = collector.tokens.get(key, [])
        assert said == (tokens if key in collector.ends else tokens[: len(said)])
    assert engine.stats().blocks_used == 0 and not engine.stats().running


def test_events_of_both_tiers_rebuild_what_is_held() -> None:
    """A subscriber that applies every event knows the same blocks as the snapshot, by tier."""
    engine, _ = make_engine(16, 12, depth=1, delays=[0, 2])
    held: set[Any] = set()
    for i in range(20):
        engine.submit_request(request(f"r{i}", [i % 5 + 1] * 13 + [i % 7 + 1], 9))
        while engine.has_work:
            for event in engine.step().events:
                key = event.tier, event.block_hash
                assert (key in held) != event.stored, "stored twice or removed unheld"
                held ^= {key}
    snapshot = engine.begin_snapshot()
    assert held == {(event.tier, event.block_hash) for _ in range(2) for event in snapshot.read_chunk(16)}
    assert snapshot.is_complete
    assert {tier.name for tier, _ in held} == {"DEVICE", "HOST"}


def test_a_broken_block_is_computed_again() -> None:
    """A wrong checksum is counted, and the prompt is computed from that block on; the answer is right."""
    engine, runner = make_engine()
    prompt = list(range(1, 42))
    ask(engine, "first", prompt)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    runner.broken = {host_block for host_block, held in runner.host.items() if held[3] == tuple(prompt[:24])}
    computed = runner.computed
    done = ask(engine, "again", prompt)
    assert done.tokens["again", 0] == answer(prompt, 4, seed=7)
    assert engine.stats().integrity_failures == 1
    assert done.first["again", 0].cached_device_tokens + done.first["again", 0].cached_host_tokens == 20
    assert runner.computed - computed == 41 - 20 + len(done.tokens["again", 0]) - 1


def test_decodes_go_on_while_blocks_come_back() -> None:
    """While a long prefix is restored, every running sequence gets a token at every step."""
    engine, runner = make_engine(300, 300)
    prompt = [i % 900 + 1 for i in range(500)]
    ask(engine, "first", prompt)
    ask(engine, "flood", [7] * 1100)
    engine.submit_request(request("talk", [3, 4], 60, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    runner_before = runner.restored
    engine.submit_request(request("again", prompt, 1))
    for said in range(1, 12):
        assert len(collector.tokens["talk", 0]) == said
        collector.step()
    assert runner.restored - runner_before > 0
    assert collector.run().tokens["again", 0] == answer(prompt, 1, seed=7)


def test_restored_prompts_stay_within_the_token_budget() -> None:
    """Prompts whose restores end together all have one token left, and no step computes more tokens than its budget."""
    engine, runner = make_engine(48, seqs=16, budget=4)
    prompts = [[index] * 9 for index in range(1, 17)]
    for index, prompt in enumerate(prompts):
        ask(engine, f"first{index}", prompt, 1)
    for index in range(3):  # evict them
        ask(engine, f"flood{index}", [50 + index] * 90, 1)
    for index, prompt in enumerate(prompts):
        engine.submit_request(request(f"again{index}", prompt, 6))
    collector, most = Collector(engine), 0
    while engine.has_work:
        computed = runner.computed
        collector.step()
        most = max(most, runner.computed - computed)
    assert engine.stats().restores > 16 and most == 4
    for index, prompt in enumerate(prompts):
        assert collector.tokens[f"again{index}", 0] == answer(prompt, 6, seed=7)


def test_two_requests_for_one_evicted_prefix_restore_it_once() -> None:
    """A request that needs a prefix which another is restoring waits, and then shares it."""
    engine, runner = make_engine(depth=1, delays=[3])
    stem = list(range(1, 41))
    ask(engine, "first", [*stem, 50])
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    for i in range(3):
        engine.submit_request(request(f"again{i}", [*stem, 60 + i], 2))
    Collector(engine).run()
    assert runner.restored == 10


def test_a_preempted_sequence_comes_back_from_the_host() -> None:
    """A preempted sequence's blocks are demoted, and restored when there is room."""
    engine, runner = make_engine(12, 64)
    for i in range(4):
        engine.submit_request(request(f"r{i}", [i + 1] * 9, 30, ignore_eos=True))
    done = Collector(engine).run()
    assert engine.stats().preemptions > 0
    for i in range(4):
        assert done.tokens[f"r{i}", 0] == answer_on([i + 1] * 9, 30)
    assert runner.restored > 0
    assert runner.computed < 4 * (9 + 29) + 5 * engine.stats().preemptions


def test_preemption_takes_whose_loss_is_cheapest() -> None:
    """Of two younger sequences the one with less computed is preempted, though the other arrived later."""
    engine, _ = make_engine(17, 0)  # the oldest is the first to find no block
    engine.submit_request(request("old", [1] * 9, 40, ignore_eos=True))
    engine.submit_request(request("small", [2] * 6, 40, ignore_eos=True))
    engine.submit_request(request("large", [3] * 26, 40, ignore_eos=True))
    collector = Collector(engine)
    while not engine.stats().preemptions:
        collector.step()
    running = {sequence.request.request_id for sequence in engine.scheduler.running}
    assert running == {"old", "large"}
    collector.run()
    for name, prompt in (("old", [1] * 9), ("small", [2] * 6), ("large", [3] * 26)):
        assert collector.tokens[name, 0] == answer_on(prompt, 40)


def test_a_preempted_sequence_is_computed_where_copying_costs_more() -> None:
    """If copying a block takes longer than computing it, preemption demotes only a trial block now and then."""
    engine, runner = make_engine(12, 64)
    costs = engine.scheduler.kv_cache.copy_cost
    for i in range(4):
        engine.submit_request(request(f"r{i}", [i + 1] * 9, 30, ignore_eos=True))
    collector = Collector(engine)
    while engine.has_work:
        engine.scheduler.kv_cache.copy_cost = dataclasses.replace(costs, demote=1.0, restore=1.0, prefill=1e-3)
        collector.step()
    evictions = sum(engine.stats().device_evictions.values())
    assert engine.stats().preemptions > 0 and runner.demoted <= evictions / 30
    for i in range(4):
        assert collector.tokens[f"r{i}", 0] == answer_on([i + 1] * 9, 30)


def test_demotions_that_were_slow_once_are_tried_again() -> None:
    """Copies that were slow once are tried now and then, so that the tier is used again when they are fast."""
    engine, runner = make_engine()
    prompt = list(range(1, 42))
    ask(engine, "first", prompt)
    runner.seconds["demote"] = 10.0
    ask(engine, "flood", [100] * 80)
    slow = runner.demoted
    ask(engine, "slow flood", [101] * 80)
    assert runner.demoted == slow > 0
    runner.seconds["demote"] = 1e-6
    for i in range(4):
        ask(engine, f"flood{i}", [102 + i] * 80)
    assert runner.demoted > slow + 10
    assert ask(engine, "again", [*([102] * 80), 7]).first["again", 0].cached_host_tokens == 80


def test_restores_that_were_slow_once_are_tried_again() -> None:
    """While restores are slow a prompt is computed, except for a trial block now and then, which measures the cost."""
    engine, runner = make_engine(host_blocks=200)
    prompt = list(range(1, 42))
    ask(engine, "first", prompt)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    runner.seconds["restore"] = 10.0
    assert ask(engine, "slow", prompt).first["slow", 0].cached_host_tokens == 40
    runner.seconds["restore"] = 1e-6
    found = []
    for i in range(60):
        for name, tokens in ((f"again{i}", prompt), (f"between{i}", [100 + i % 3] * 80)):
            found.append(ask(engine, name, tokens).first[name, 0].cached_host_tokens)
    tried = found.index(4)  # one block
    assert max(found[:tried]) == 0 and max(found[tried + 1 :]) > 20


def test_the_31st_slow_restore_is_a_trial_however_often_its_blocks_are_searched() -> None:
    """30 restores are rejected between two trials, also where a request waits beside another prompt, so that its blocks
    are searched more often than once."""
    engine, runner = make_engine(host_blocks=400)
    prompts = [[100 + i] * 80 for i in range(6)]  # the last two evict the others
    for i, prompt in enumerate(prompts):
        ask(engine, f"first{i}", prompt)
    runner.seconds["restore"] = 10.0
    assert ask(engine, "slow", prompts[3]).first["slow", 0].cached_host_tokens
    restored = []
    for i in range(1, 70):
        if i % 4 == 0:
            engine.submit_request(request(f"beside{i}", [200 + i] * 8, 1))
        restored.append(ask(engine, f"again{i}", prompts[i % 3]).first[f"again{i}", 0].cached_host_tokens)
    trials = [index for index, tokens in enumerate(restored) if tokens]
    assert trials == [30, 61]


def answer_on(prompt: list[int], max_tokens: int) -> list[int]:
    """The fake model's answer without an end token."""
    said: list[int] = []
    while len(said) < max_tokens:
        said.append(next_token(prompt + said, 0, 7))
    return said


@pytest.mark.parametrize("host_blocks", [0, 12])
def test_a_retention_counts_while_its_request_waits(host_blocks: int) -> None:
    """The retention of a waiting request counts already while others run."""
    engine, runner = make_engine(24, host_blocks)
    runner.seconds["restore"] = 10.0  # so slow that nothing is restored
    wanted = list(range(1, 21))
    ask(engine, "older", [*wanted, 22], 1)
    ask(engine, "newer", list(range(101, 122)), 1)
    engine.submit_request(request("runs", list(range(201, 241)), 32, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    waits = request("waits", [*wanted, *range(301, 332)], 1)
    engine.submit_request(dataclasses.replace(waits, retention=Retention(50)))
    while ("runs", 0) not in collector.ends:
        collector.step()
    assert engine.stats().device_evictions
    assert collector.run().first["waits", 0].cached_device_tokens == 20


def test_without_a_host_tier_nothing_is_copied() -> None:
    """With 0 host blocks no plan has a copy."""
    engine, runner = make_engine(host_blocks=0)
    for i in range(5):
        ask(engine, f"r{i}", [100 + i] * 80)
    assert runner.demoted == runner.restored == 0 and not engine.scheduler.kv_cache.has_copies


@pytest.mark.parametrize("depth", [0, 1])
def test_a_reset_cache_holds_nothing(depth: int) -> None:
    """After a reset no unused block is cached in either tier, the events say so, and answers are the same; the blocks
    of a running request stay."""
    engine, _ = make_engine(depth=depth)
    prompt = list(range(1, 42))
    ask(engine, "first", prompt)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    assert engine.stats().blocks_cached and engine.stats().host_blocks_used
    collector = Collector(engine)
    engine.submit_request(request("running", [7] * 30, max_tokens=20))
    for _ in range(6):
        collector.step()
    engine.reset_prefix_cache()
    engine.check()
    assert engine.stats().blocks_cached == 0
    held = {event.block_hash for event in engine.begin_snapshot().read_chunk(1000)}
    assert len(held) >= 3  # those of the running request
    assert collector.run().tokens["running", 0] == answer([7] * 30, 20, seed=7)
    done = ask(engine, "again", prompt)
    assert done.tokens["again", 0] == answer(prompt, 4, seed=7)
    assert (done.first["again", 0].cached_device_tokens, done.first["again", 0].cached_host_tokens) == (0, 0)
