"""An engine with a device tier and a host tier over a FakeRunner, and one request run to its end."""

import random
from itertools import count

from coatcheck.workers.engine.engine import Engine
from tests.workers.collector import Collector, request
from tests.workers.fake_runner import SPEC, FakeRunner


def make_engine(
    num_blocks: int = 24,
    host_blocks: int = 64,
    *,
    depth: int = 0,
    delays: list[int] | None = None,
    seqs: int = 8,
    budget: int = 64,
) -> tuple[Engine, FakeRunner]:
    """4-token blocks; a step takes a millisecond for each time that somebody looks at the clock."""
    rng = random.Random(1)
    runner = FakeRunner(num_blocks, 4, delay=lambda: rng.choice(delays or [0]))
    ticks = count()
    engine = Engine(
        SPEC,
        runner,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_batch_tokens=budget,
        host_blocks=host_blocks,
        pipeline_depth=depth,
        clock=lambda: next(ticks) * 1e-3,
    )
    return engine, runner


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4, **changes: object) -> Collector:
    """Runs one request to its end, with nothing beside it."""
    engine.submit_request(request(name, prompt, max_tokens, **changes))
    return Collector(engine).run()
