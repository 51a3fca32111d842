"""Loads checkpoints onto a simulated GPU, for test_simulated_gpu.py. Tensors of different devices do not mix there.

With the argument `capture` and a file with a JSON object, path of a checkpoint -> the tokens of each request, it
captures each model's steps too, serves the requests, and compares the tokens. With the argument `bits` it serves each
checkpoint with --deterministic and compares bits. Prints a line for each checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.kernels.triton.mended_interpreter import mend_products
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.install import install
from tests.simulated_gpu.simulated_run import make, serve
from tests.simulated_gpu.tensors import DEVICE

_BLOCKS, _SIZE = 7, 8  # those of simulated_run.make
_PROMPTS = {"short": [7, 8, 9], "one block": list(range(3, 11)), "long": [(5 * i) % 40 + 3 for i in range(21)]}
_SAMPLING = SamplingParams(temperature=0.9, max_tokens=3, seed=11, ignore_eos=True, logprobs=2)

Answer = tuple[list[int], list[float]]


def main() -> None:
    gpu = install()
    if sys.argv[1] == "capture":
        for path, want in json.loads(Path(sys.argv[2]).read_text()).items():
            check_graphs(Path(path), want)
        return
    if sys.argv[1] == "bits":
        for path in sys.argv[2:]:
            check_bits(Path(path), gpu)
        return
    for path in sys.argv[1:]:
        model = load_model(Path(path), communicator=Communicator(), dtype="bfloat16", device=DEVICE)
        print(model.spec.architecture)


def check_graphs(path: Path, want: list[list[int]]) -> None:
    runner = make(path, DEVICE, "auto")
    runner.graphs.capture()
    assert runner.graphs.shapes, f"{path}: no graph was captured"
    have, _ = serve(runner, rounds=1)
    assert have == want, (path, have, want)
    assert runner.graphs.steps > 0, f"{path}: no step was replayed"
    print(path)


def check_bits(path: Path, gpu: SimulatedGpu) -> None:
    """With --deterministic each request has the same tokens and bits of log-probabilities alone, beside the others, and
    with its prompt in chunks."""
    mend_products()
    runner = make(path, DEVICE, "auto", deterministic=True)
    alone: dict[str, Answer] = {}
    for name in _PROMPTS:
        alone |= answers_of(runner, [name], 24)
    assert gpu.kernels["_rms_norm"], "our kernel computed no norm"
    for budget in (24, 7):
        answers = answers_of(runner, [*_PROMPTS], budget)
        for name, answer in alone.items():
            assert len(answer[0]) == 3 and answers[name] == answer, (name, budget, answers[name], answer)
    print(path)


def answers_of(runner: ModelRunner, names: list[str], budget: int) -> dict[str, Answer]:
    """Tokens and log-probabilities of requests that are submitted together. `budget`: the most tokens of a step."""
    engine = Engine(
        runner.model.spec, runner, num_blocks=_BLOCKS, host_blocks=0, block_size=_SIZE, max_num_seqs=4,
        max_batch_tokens=budget,
    )  # fmt: skip
    answers: dict[str, Answer] = {name: ([], []) for name in names}
    for name in names:
        engine.submit_request(EngineRequest(name, tuple(_PROMPTS[name]), _SAMPLING))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = answers[output.request_id]
            tokens += output.token_ids
            for one in output.logprobs:
                logprobs += [one.logprob, *(value for _, value in one.top)]
    return answers


if __name__ == "__main__":
    main()
