"""Sampling on several ranks: a request's tokens do not depend on tp."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.workers.checkpoints import VOCAB, tiny_checkpoint
from tests.workers.ranks import run_ranks

PROMPTS = [[(i * step + 11) % (VOCAB - 3) + 3 for i in range(30 + step)] for step in (5, 7, 37)]
SAMPLING = SamplingParams(
    max_tokens=10,
    seed=2**40 + 9,
    ignore_eos=True,
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    logprobs=2,
    n=2,
)


def answer(communicator: Communicator, path: Path) -> dict[str, Any] | None:
    """Tokens and logprobs of every choice on rank 0. The other ranks carry out its plans and return nothing."""
    model = load_model(path, communicator=communicator, device="cpu")
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    pool = allocate_kv_pool(layout, 60, torch.device("cpu"))
    runner = ModelRunner(model, layout, pool, max_num_seqs=8, max_model_len=256)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator)
    engine = Engine(model.spec, group, num_blocks=60, block_size=8, max_num_seqs=8, max_batch_tokens=24)
    for index, prompt in enumerate(PROMPTS):
        engine.submit_request(EngineRequest(f"r{index}", tuple(prompt), SAMPLING))
    said: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = said.setdefault(f"{output.request_id}.{output.choice}", ([], []))
            tokens += output.token_ids
            logprobs += [logprob.logprob for logprob in output.logprobs]
    group.stop_followers()
    return said


@cache
def answer_alone(path: Path) -> dict[str, Any] | None:
    """One rank's."""
    return answer(Communicator(), path)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.full), 4])
def test_sampled_tokens_are_the_same_at_every_tp(checkpoint_directory: Path, tp: int) -> None:
    """With a seed, temperature, filters, penalties and n, every number of ranks draws what one rank draws."""
    path = tiny_checkpoint("llama", checkpoint_directory)
    alone = answer_alone(path)
    together = run_ranks(tp, answer, path)[0]
    assert alone is not None and together.keys() == alone.keys()
    for key, (tokens, logprobs) in alone.items():
        assert together[key][0] == tokens
        assert together[key][1] == pytest.approx(logprobs, abs=1e-4)
