"""The prefix cache of models that keep states: prompts start at snapshots of states.

The fake model fails if a row starts from another state than that of its own tokens.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import MissReason, Tier
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.state_snapshots import StateSnapshots
from tests.examples import examples
from tests.workers.collector import Collector, make_engine, request
from tests.workers.fake_runner import FakeStep, answer, next_token

SYSTEM = [1 + i % 7 for i in range(100)]  # 25 blocks
QUESTION = [20 + i % 9 for i in range(80)]


def states_of(engine: Engine) -> StateSnapshots:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 6, **changes: object) -> tuple[int, list[int]]:
    """(cached tokens, the answer of choice 0) of a request that runs alone."""
    engine.submit_request(request(name, prompt, max_tokens, **changes))
    done = Collector(engine).run()
    assert done.tokens[name, 0] == answer(prompt, max_tokens, seed=7)
    return done.first[name, 0].cached_device_tokens, done.tokens[name, 0]


@pytest.mark.parametrize("depth", [0, 1])
def test_each_turn_starts_at_the_end_of_the_last_prompt(depth: int) -> None:
    """A conversation computes no prompt twice: of each turn, the answer before and the new message are left."""
    engine, runner = make_engine(300, depth=depth, snapshots=4, budget=48)
    prompt, length, computed = SYSTEM, 0, 0
    for turn in range(4):
        cached, said = ask(engine, f"turn{turn}", prompt)
        assert cached == max(length - 4, 0) // 4 * 4  # a template may end a prompt with 4 tokens that are not repeated
        # A step that was launched before the answer's end was known computes one more.
        assert runner.computed - computed - (len(prompt) - cached + len(said) - 1) in range(depth + 1)
        computed, length = runner.computed, len(prompt)
        prompt = prompt + said + [turn + 9] * 70
    stats = engine.stats().snapshots
    assert (stats.slots, stats.held, stats.saves, stats.restores, stats.evictions) == (4, 4, 4, 3, 0)


def test_a_shared_prompt_is_found_from_the_third_request_on() -> None:
    """The second request shows where prompts part, and saves the states there."""
    engine, _ = make_engine(300, snapshots=8)
    cached = [ask(engine, f"r{i}", SYSTEM + [100 + i] * 70)[0] for i in range(4)]
    assert cached == [0, 0, 100, 100]
    assert engine.stats().prefix_misses[MissReason.NO_SNAPSHOT] == 1
    assert states_of(engine).num_saves == 5


def test_short_distances_are_computed_again() -> None:
    """A prompt of fewer than 68 tokens saves no snapshot, and none is saved less than 64 tokens after another."""
    engine, runner = make_engine(300, snapshots=8)
    assert ask(engine, "short", QUESTION[:66], 1)[0] == 0
    assert runner.plans == 2 and states_of(engine).num_saves == 0
    ask(engine, "first", SYSTEM, 1)
    assert states_of(engine).num_saves == 1
    assert ask(engine, "second", SYSTEM + QUESTION[:40], 1)[0] == 96
    assert states_of(engine).num_saves == 1


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    """The others wait for the snapshot, and compute the tokens after it."""
    engine, runner = make_engine(300, snapshots=8)
    for i in range(4):
        engine.submit_request(request(f"r{i}", SYSTEM, 1))
    Collector(engine).run()
    assert runner.computed == 100 + 3 * 4


def test_choices_start_at_the_snapshot_of_their_prompt() -> None:
    """n choices compute the prompt once, however short it is, and each its last tokens."""
    engine, runner = make_engine(300, snapshots=8)
    engine.submit_request(request("a", SYSTEM[:30], 6, n=3, ignore_eos=True))
    done = Collector(engine).run()
    assert runner.computed == 30 + 2 * (30 - 24) + 3 * 5
    for choice in range(3):
        assert done.tokens["a", choice] == answer(SYSTEM[:30], 6, choice, 7)


def test_choices_that_another_group_began_start_at_the_snapshot_of_their_prompt() -> None:
    """After a failover each choice computes its own answer again, and one of them the prompt."""
    engine, runner = make_engine(300, snapshots=8)
    wanted = {choice: unended_answer(SYSTEM, 72, choice) for choice in range(3)}
    delivered = {choice: tuple(tokens[:70]) for choice, tokens in wanted.items()}
    engine.submit_request(request("a", SYSTEM, 72, n=3, ignore_eos=True, resume=delivered))
    done = Collector(engine).run()
    assert done.tokens == {("a", choice): tokens[70:] for choice, tokens in wanted.items()}
    assert runner.computed == 96 + 3 * (4 + 70 + 1)


def test_a_preempted_sequence_resumes_at_its_snapshot() -> None:
    """It computes its answer again, but not its prompt."""
    engine, runner = make_engine(60, snapshots=4)
    prompts = {name: [index] * 99 for index, name in enumerate("ab", start=1)}
    for name, prompt in prompts.items():
        engine.submit_request(request(name, prompt, 40, ignore_eos=True))
    done = Collector(engine).run()
    assert engine.stats().preemptions == 1
    for name, prompt in prompts.items():
        assert done.tokens[name, 0] == answer(prompt, 40, seed=7) or len(done.tokens[name, 0]) == 40
    assert runner.computed < 2 * (99 + 39) + 99


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_answer_is_not_computed_again(depth: int) -> None:
    """The next turn starts at most 67 tokens before the end of the answer: a sequence that decodes saves its states
    every 64 tokens at the end of a block, each time in the same slot."""
    engine, runner = make_engine(300, depth=depth, snapshots=4)
    length = 210
    said = said_by_long(engine, "a", SYSTEM, length)
    states = states_of(engine)
    assert states.num_saves == 1 + length // 64 and len(states) == 2
    computed = runner.computed
    cached, _ = ask(engine, "b", SYSTEM + said + QUESTION)
    assert cached == (96 + length // 64 * 64)
    assert runner.computed - computed < 67 + len(QUESTION) + 10


def said_by_long(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    """The answer of exactly `max_tokens` tokens."""
    engine.submit_request(request(name, prompt, max_tokens, ignore_eos=True))
    return Collector(engine).run().tokens[name, 0]


def test_an_ended_answer_leaves_its_last_snapshot_however_it_ends() -> None:
    """An aborted sequence leaves the states that it has saved, and one that was preempted starts at them again."""
    engine, runner = make_engine(300, snapshots=4)
    engine.submit_request(request("a", SYSTEM, 400, ignore_eos=True))
    collector = Collector(engine)
    while len(collector.tokens.get(("a", 0), [])) < 100:
        collector.step()
    engine.abort_request("a")
    said = collector.run().tokens["a", 0]
    assert ask(engine, "b", SYSTEM + said + QUESTION)[0] == 96 + 64

    engine, runner = make_engine(90, snapshots=4)
    for index, (name, limit) in enumerate((("older", 90), ("younger", 150)), start=1):
        engine.submit_request(request(name, [index] * 99, limit, ignore_eos=True))
    done = Collector(engine).run()
    assert engine.stats().preemptions == 1
    assert done.tokens["younger", 0] == unended_answer([2] * 99, 150)
    assert runner.computed < 99 + 89 + 99 + 149 + 40


def test_answers_take_at_most_half_of_the_slots() -> None:
    """Sequences that decode leave the other half for prompts, and a single slot is for prompts alone."""
    for snapshots, saves in ((1, 1), (2, 2 + 1), (3, 2 + 1), (4, 2 + 2)):
        engine, _ = make_engine(300, snapshots=snapshots, budget=256)
        for index in range(2):
            engine.submit_request(request(f"r{index}", [index + 1] * 90, 66, ignore_eos=True))
        Collector(engine).run()
        assert states_of(engine).num_saves == saves


def test_a_step_copies_the_states_of_few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six sequences of one length, four save their states at the end of a block, and two at that of the next one."""
    engine, runner = make_engine(300, snapshots=12, budget=600)
    saves: list[int] = []
    launch = runner.launch

    def launch_and_count(plan: StepPlan) -> FakeStep:
        saves.append(len(plan.state_saves))
        return launch(plan)

    monkeypatch.setattr(runner, "launch", launch_and_count)
    for index in range(6):
        engine.submit_request(request(f"r{index}", [index + 1] * 90, 74, ignore_eos=True))
    Collector(engine).run()
    assert [count for count in saves if count] == [6, 4, 2]
    first, second = (step for step, count in enumerate(saves) if count in (4, 2))
    assert second == first + 4


def test_a_preempted_sequence_whose_snapshots_were_evicted_computes_all_again() -> None:
    """Another request takes the only slot, and blocks of the preempted sequence, while that waits: it starts at its
    first token, and its answer goes on exactly."""
    engine, runner = make_engine(60, snapshots=1)
    collector = Collector(engine)
    for index, name in enumerate(("older", "younger"), start=1):
        engine.submit_request(request(name, [index] * 99, 40, ignore_eos=True))
    while not engine.stats().preemptions:
        collector.step()
    before, computed = len(collector.tokens["younger", 0]), runner.computed
    engine.submit_request(request("urgent", [3] * 70, 1, priority=-1))
    collector.run()
    for index, name in enumerate(("older", "younger"), start=1):
        assert collector.tokens[name, 0] == unended_answer([index] * 99, 40)
    assert runner.computed - computed >= 70 + 99 + before


def unended_answer(prompt: list[int], max_tokens: int, choice: int = 0) -> list[int]:
    """As `answer`, of a request that ignores the end of the sequence."""
    said: list[int] = []
    while len(said) < max_tokens:
        said.append(next_token(prompt + said, choice, 7))
    return said


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    """With two slots, a third prompt takes the slot of the one that was not asked for again."""
    engine, _ = make_engine(300, snapshots=2)
    first, second, third = SYSTEM, QUESTION * 2, [50] * 90
    for name, prompt, cached in (("a", first, 0), ("b", second, 0), ("a2", first, 96), ("c", third, 0)):
        assert ask(engine, name, prompt)[0] == cached
    assert sum(states_of(engine).evictor.num_evictions.values()) == 1
    assert ask(engine, "a3", first)[0] == 96
    assert ask(engine, "b2", second)[0] == 0


def test_snapshots_of_neighbouring_blocks_are_evicted_by_their_last_use_too() -> None:
    """A longer prompt starts at the snapshot of a shorter one. The shorter one is evicted first, as it is older."""
    engine, _ = make_engine(300, snapshots=3, budget=400)
    for index, length in enumerate((30, 34, 38)):
        ask(engine, f"r{index}", SYSTEM[:length], 1, n=2)
    assert len(states_of(engine)) == 3
    ask(engine, "other", [50] * 90, 1)
    assert ask(engine, "again", SYSTEM[:38], 1)[0] == 32


def test_retained_snapshots_and_those_of_other_tenants_stay() -> None:
    """A prompt that is to be kept, and one of a tenant that asks seldom, are found after a tenant has asked for more
    prompts than there are slots; the prompt that is not needed again gives up its slot first."""
    engine, _ = make_engine(1000, snapshots=8)

    def cached(name: str, token: int, tenant: str = "flood", retention: Retention | None = None) -> int:
        asked = replace(request(name, [token] * 99, 1), tenant=tenant, retention=retention)
        engine.submit_request(asked)
        return Collector(engine).run().first[name, 0].cached_device_tokens

    cached("kept", 1, retention=Retention(80))
    cached("seldom", 2, "seldom")
    for index in range(10):
        cached(f"flood{index}", 10 + index)
    cached("unwanted", 3, retention=Retention(0))
    assert cached("oldest", 15) == 92  # flood5, the oldest that is left
    cached("one more", 50)
    assert cached("kept again", 1) == cached("seldom again", 2, "seldom") == 92
    assert cached("unwanted again", 3) == 0


def test_a_snapshot_goes_with_the_kv_of_its_block() -> None:
    """Its slot is free again, and the events of a group tell its routers of both."""
    engine, _ = make_engine(60, snapshots=4)
    ask(engine, "a", SYSTEM)
    held = {event.block_hash for event in states_of(engine).stored_events(states_of(engine).prefix_hashes())}
    engine.reset_prefix_cache()
    engine.check()
    engine.submit_request(request("b", QUESTION[:9], 1))
    removed = [event for event in engine.step().events if event.tier is Tier.STATE]
    assert len(held) == 1 and not len(states_of(engine))
    assert [(event.stored, event.block_hash) for event in removed] == [(False, *held)]


def test_a_prompt_whose_kv_was_just_evicted_saves_a_new_snapshot() -> None:
    """The snapshot is dropped before the prompt chooses where to save its states, and not after the step."""
    engine, _ = make_engine(300, snapshots=4, budget=48)
    ask(engine, "a", SYSTEM)
    engine.reset_prefix_cache()
    assert ask(engine, "b", SYSTEM)[0] == 0
    assert ask(engine, "c", SYSTEM)[0] == 96


def test_a_check_finds_what_would_end_in_wrong_states_or_in_waiting_for_ever() -> None:
    """A snapshot that outlived its block, a snapshot point that was passed, and a pending block that is registered."""
    engine, _ = make_engine(300, snapshots=4)
    ask(engine, "a", SYSTEM)
    states, pool = states_of(engine), engine.scheduler.pool
    pool.states = None
    pool.evict_unused_blocks()
    pool.states = states
    with pytest.raises(AssertionError, match="outlived its block"):
        engine.check()

    engine, _ = make_engine(300, snapshots=4, budget=48)
    engine.submit_request(request("a", SYSTEM, 1))
    engine.step()
    (sequence,) = engine.scheduler.running
    points, sequence.snapshot_points = sequence.snapshot_points, [5]
    with pytest.raises(AssertionError, match="was passed"):
        engine.check()
    sequence.snapshot_points = points
    engine.check()
    engine.scheduler.kv_cache._pending[sequence.block_hashes[0]] = sequence
    with pytest.raises(AssertionError, match="registered block is pending"):
        engine.check()


def test_a_scored_prompt_is_computed_whole() -> None:
    """It starts at no snapshot, leaves one for others, and saves none twice."""
    engine, _ = make_engine(300, snapshots=4)
    engine.submit_request(request("scored", SYSTEM, 1, prompt_logprobs=0))
    Collector(engine).run()
    engine.submit_request(request("again", SYSTEM, 1, prompt_logprobs=0))
    assert Collector(engine).run().first["again", 0].cached_device_tokens == 0
    assert states_of(engine).num_saves == 1
    assert ask(engine, "b", SYSTEM)[0] == 96


@settings(max_examples=examples(25), deadline=None)
@given(
    data=st.data(),
    depth=st.integers(0, 1),
    num_blocks=st.integers(46, 120),
    budget=st.integers(8, 90),
    snapshots=st.integers(1, 5),
)
def test_any_mix_is_answered_exactly(
    data: st.DataObject, depth: int, num_blocks: int, budget: int, snapshots: int
) -> None:
    """Shared prefixes, choices, resumes, aborts, resets, preemption and eviction in any order: every row starts from
    the state of its own tokens, no slot is lost, and a router that applies all events has what is held."""
    seqs = data.draw(st.integers(1, 6))
    engine, _ = make_engine(num_blocks, depth=depth, seqs=seqs, budget=budget, snapshots=snapshots)
    collector = Collector(engine)
    stems = [[5] * 70, [6] * 68, [5] * 34 + [7] * 50, [8] * 5]
    wanted: dict[tuple[str, int], list[int]] = {}
    for i in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.sampled_from(stems)) + data.draw(st.lists(st.integers(1, 3), max_size=2)) * 12
        n, limit = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([*range(1, 13), 68]))
        resume = {}
        for choice in range(n):
            whole = answer(prompt, limit, choice, 7)
            kept = data.draw(st.integers(0, len(whole))) if data.draw(st.booleans()) else 0
            resume[choice] = tuple(whole[:kept])
            wanted[f"r{i}", choice] = whole[kept:]
        engine.submit_request(request(f"r{i}", prompt, limit, n=n, resume=resume))
        for _ in range(data.draw(st.integers(0, 4))):
            collector.step()
        if data.draw(st.integers(0, 4)) == 0:
            engine.abort_request(*data.draw(st.sampled_from(sorted(wanted))))
            engine.check()
        if data.draw(st.integers(0, 9)) == 0:
            engine.reset_prefix_cache()
    collector.run()
    for key, tokens in wanted.items():
        if key in collector.ends:
            assert collector.tokens[key] == tokens
        else:
            assert collector.tokens.get(key, []) == tokens[: len(collector.tokens.get(key, []))]
    assert engine.stats().blocks_used == 0 and not engine.stats().running
    engine.step()
    states = states_of(engine)
    assert len(states) <= snapshots
    assert {*states.prefix_hashes()} <= {*engine.scheduler.pool.prefix_hashes()}
