"""Answers of an engine whose requests have adapters, with the adapters stacked as on a GPU.

As a module with TRITON_INTERPRET=1 it runs the Triton kernels in Triton's interpreter, in padded steps on one rank and
in plain ones on two, and compares the tokens with those that the parent process passes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from coatcheck.kernels.lora.shrink_expand import StackedLora
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.ranks import run_ranks
from tests.workers.runner.padded_steps import make_runner

PROMPT = [(i * 37 + 11) % 190 + 3 for i in range(19)]
COUNT = 3
_SAMPLING = SamplingParams(max_tokens=COUNT, temperature=0.0, seed=1, ignore_eos=True)


def ask_each(runner: ModelRunner | TpRunner, spec_of: ModelRunner, names: Sequence[str]) -> dict[str, list[int]]:
    """The greedy tokens after PROMPT of a request for each of `names` at the same time; "" has no adapter. The prompts
    are computed in chunks beside decodes."""
    engine = Engine(
        spec_of.model.spec, runner, num_blocks=len(spec_of.pool), block_size=8, max_num_seqs=4, max_batch_tokens=12
    )
    said: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        engine.submit_request(EngineRequest(name or "none", tuple(PROMPT), _SAMPLING, adapter=name))
    while engine.has_work:
        for output in engine.step().outputs:
            said[output.request_id.replace("none", "")] += output.token_ids
    engine.check()
    return said


def _answer(communicator: Communicator, argument: tuple[str, list[LoraModule], bool]) -> dict[str, list[int]] | None:
    """Rank 0's answers."""
    path, modules, has_graphs = argument
    model = load_model(path, communicator=communicator, device="cpu", dtype="float32", lora_modules=modules)
    assert model.lora_step.num_stacked == len(modules)
    assert any(isinstance(linear.lora, StackedLora) for linear in model._body.linears())
    sizes = GraphSizes((4,), (16,)) if has_graphs else GraphSizes()
    runner = make_runner(model, sizes, communicator=communicator)
    runner.graphs.capture()
    runner.pool.fill_(255)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator) if communicator.size > 1 else None
    said = ask_each(group or runner, runner, ["", *(module.name for module in modules)])
    assert (runner.graphs.steps > 0) == has_graphs
    if group is not None:
        group.stop_followers()
    return said


def main() -> None:
    torch.set_num_threads(1)
    path, modules, expected = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    loaded = [LoraModule(name, folder) for name, folder in modules.items()]
    for ranks, has_graphs in ((1, True), (2, False)):
        said = run_ranks(ranks, _answer, (path, loaded, has_graphs))[0]
        assert said == expected, (ranks, said, expected)
    print("agreed")


if __name__ == "__main__":
    main()
