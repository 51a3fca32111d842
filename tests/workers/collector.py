"""Collector: steps an engine over FakeRunner to its end, and collects the tokens of every choice."""

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import SequenceOutput
from coatcheck.workers.engine.engine import Engine
from tests.workers.fake_runner import SPEC, FakeRunner


def make_engine(
    num_blocks: int = 64, *, depth: int = 0, seqs: int = 8, budget: int = 64, snapshots: int = 0, drafts: int = 0
) -> tuple[Engine, FakeRunner]:
    """An engine over 4-token blocks. With `snapshots` its model keeps states."""
    runner = FakeRunner(num_blocks, 4, keeps_states=snapshots > 0)
    engine = Engine(
        SPEC,
        runner,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_batch_tokens=budget,
        pipeline_depth=depth,
        num_snapshots=snapshots,
        max_draft_tokens=drafts,
    )
    return engine, runner


def request(name: str, prompt: list[int], max_tokens: int = 8, **changes: object) -> EngineRequest:
    """A greedy request."""
    resume = changes.pop("resume", {})
    salt, priority = changes.pop("salt", ""), changes.pop("priority", 0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=7, **changes)  # type: ignore[arg-type]
    return EngineRequest(name, tuple(prompt), params, resume, salt, priority)  # type: ignore[arg-type]


class Collector:
    """Steps an engine and collects the tokens of each choice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], SequenceOutput] = {}
        self.first: dict[tuple[str, int], SequenceOutput] = {}

    def step(self) -> None:
        """Step once, and check every invariant."""
        for output in self.engine.step().outputs:
            key = (output.request_id, output.choice)
            assert key not in self.ends, "an ended choice goes on"
            self.first.setdefault(key, output)
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason:
                self.ends[key] = output
        self.engine.check()

    def run(self) -> "Collector":
        """Step until the engine has no work."""
        for _ in range(5000):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError("the engine never ends")
