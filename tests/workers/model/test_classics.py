"""Three common ways to run out of KV memory, each with a pool that is too small."""

import pytest

from coatcheck.proto.errors import NeverFits
from tests.workers.collector import Collector, request
from tests.workers.fake_runner import answer
from tests.workers.kv.two_tier_engine import make_engine


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_long_context_crash(host_blocks: int) -> None:
    """A prompt longer than the pool is refused at once with what to change. The running request is not disturbed."""
    engine, _ = make_engine(20, host_blocks)
    engine.submit_request(request("chat", [1, 2, 3], 30, ignore_eos=True))
    collector = Collector(engine)
    collector.step()
    with pytest.raises(
        NeverFits,
        match="maximum context length is 80 tokens; the prompt has .* and max_tokens is .*. Shorten the prompt",
    ):
        engine.submit_request(request("document", [4] * 4000, 1))
    assert len(collector.run().tokens["chat", 0]) == 30
    engine.submit_request(request("longest", [5] * 76, 4))
    assert Collector(engine).run().tokens["longest", 0] == answer([5] * 76, 4, seed=7)


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_batch_size_wall(host_blocks: int) -> None:
    """Of 50 requests over a pool for ten, at least ten run and others wait. Each request gets its own answer."""
    engine, _ = make_engine(10 * 8 + 10, host_blocks, seqs=50)
    prompts = {f"user{i}": [i + 1, *range(100, 123)] for i in range(50)}  # 24 tokens, and 8 more: eight blocks
    for name, prompt in prompts.items():
        engine.submit_request(request(name, prompt, 8))
    collector, most = Collector(engine), 0
    while engine.has_work:
        collector.step()
        most = max(most, engine.stats().running)
        assert engine.stats().blocks_used <= engine.stats().blocks_total
    assert 10 <= most < 50
    for name, prompt in prompts.items():
        assert collector.tokens[name, 0] == answer(prompt, 8, seed=7)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_multi_turn_creep(elsewhere: bool) -> None:
    """Each of 40 turns of a chat computes only its new tokens, also if other requests push its blocks to the host."""
    engine, runner = make_engine(200, 400 if elsewhere else 0)
    history: list[int] = []
    computed, steps = [], []
    for turn in range(40):
        history += [turn + 1, 7, 8, 9, 10]
        before = runner.computed, runner.plans
        engine.submit_request(request(f"turn{turn}", history, 4, ignore_eos=True))
        history += Collector(engine).run().tokens[f"turn{turn}", 0]
        computed.append(runner.computed - before[0])
        steps.append(runner.plans - before[1])
        if elsewhere:
            engine.submit_request(request(f"other{turn}", [500 + turn] * 780, 1))
            Collector(engine).run()
    assert len(history) == 40 * 9
    assert max(computed[1:]) <= computed[1] + 4, "a turn computes what an earlier one had computed"
    assert max(steps[1:]) <= steps[1] + (12 if elsewhere else 1)
    assert not elsewhere or runner.restored > 1000
