"""Ranks with --mla-shard tokens that run the Triton kernels in the interpreter, for test_token_shards.py.

Run with TRITON_INTERPRET=1 as `python -m tests.workers.model.gathered_contexts CHECKPOINT KV_DTYPE`. Prints one JSON
object: tp -> for each step, the sampled tokens, and how many layers gathered their context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.latent_attention import LatentAttention
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.graph_shapes import GraphSizes
from tests.kernels.triton.mended_interpreter import reduce_work
from tests.workers.ranks import run_ranks
from tests.workers.runner.padded_steps import make_runner

_GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
_PROMPTS = ([*range(3, 23)], [9] * 9, [5, 6, 7, 8] * 8)
# (slot, first token, tokens) of each row: two prompts, their decodes, a decode beside a chunk, a chunk behind a prefix.
_STEPS = (
    [(0, 0, 20), (1, 0, 9)],
    [(0, 20, 1), (1, 9, 1)],
    [(0, 21, 1), (2, 0, 20)],
    [(2, 20, 12)],
)

Steps = list[tuple[list[int], int]]


def compute(communicator: Communicator, argument: tuple[Path, str]) -> Steps:
    reduce_work()
    path, kv_dtype = argument
    model = load_model(path, communicator=communicator, dtype="float32", device="cpu", mla_shard="tokens")
    runner = make_runner(model, GraphSizes(), kv_dtype)
    gathers = []
    gather = LatentAttention._attend_gathered
    LatentAttention._attend_gathered = lambda self, *rest: gathers.append(self) or gather(self, *rest)  # type: ignore[func-returns-value,method-assign]
    news = [NewSequence(slot, 0, len(p), [*p], _GREEDY, ()) for slot, p in enumerate(_PROMPTS)]
    # Blocks in no order of the sequences.
    writes = [TableWrite(slot, index, 3 * index + 2 - slot) for slot in range(3) for index in range(5)]
    runner.launch(StepPlan(new_sequences=news, table_writes=writes))
    steps: Steps = []
    for rows in _STEPS:
        gathers.clear()
        plan = StepPlan(scheduled=[ScheduledSequence(*row, needs_sample=True) for row in rows])
        steps.append((runner.launch(plan).wait().token_ids, len(gathers)))
    return steps


def main() -> None:
    argument = Path(sys.argv[1]), sys.argv[2]
    found = {}
    for tp in (1, 2, 4):
        ranks = run_ranks(tp, compute, argument)
        assert all(steps == ranks[0] for steps in ranks)
        found[tp] = ranks[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
