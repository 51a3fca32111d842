"""Sampling on several ranks: a request's tokens do not depend on tp."""

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.prompt_lookup import Draft, PromptLookup
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.runner_protocol import Runner
from coatcheck.workers.core.step_output import EngineStats
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
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


def load_runner(communicator: Communicator, path: Path) -> ModelRunner:
    """One rank's runner, with a pool of 60 blocks of 8 tokens."""
    model = load_model(path, communicator=communicator, device="cpu")
    layout = BlockLayout.of(model.spec.layers, 8, KvDtype.FLOAT32)
    pool = allocate_kv_pool(layout, 60, torch.device("cpu"))
    return ModelRunner(model, layout, pool, max_num_seqs=8, max_model_len=256)


def answer(communicator: Communicator, path: Path) -> dict[str, Any] | None:
    """Tokens and logprobs of every choice on rank 0. The other ranks carry out its plans and return nothing."""
    runner = load_runner(communicator, path)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator)
    said, _ = run(runner.model, group)
    group.stop_followers()
    return said


def run(model: Model, runner: Runner, max_draft_tokens: int = 0) -> tuple[dict[str, Any], EngineStats]:
    """(tokens, logprobs) of every choice. All steps take equally long, so that rows of drafts are free."""
    ticks = count()
    engine = Engine(
        model.spec, runner, num_blocks=60, block_size=8, max_num_seqs=8, max_batch_tokens=24,
        max_draft_tokens=max_draft_tokens, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    for index, prompt in enumerate(PROMPTS):
        engine.submit_request(EngineRequest(f"r{index}", tuple(prompt), SAMPLING))
    said: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = said.setdefault(f"{output.request_id}.{output.choice}", ([], []))
            tokens += output.token_ids
            logprobs += [logprob.logprob for logprob in output.logprobs]
    return said, engine.stats()


def answer_with_drafts(communicator: Communicator, path: Path) -> tuple[Any, ...] | None:
    """What ranks say without drafts and with them, and the counts of drafts. Every third guess is wrong."""
    runner = load_runner(communicator, path)
    if communicator.rank:
        follow_driver(runner, communicator)
        return None
    group = TpRunner(runner, communicator)
    plain, _ = run(runner.model, group)
    texts = [PROMPTS[int(key[1])] + tokens for key, (tokens, _) in plain.items()]

    def guess(self: PromptLookup, token_ids: list[int], count: int) -> Draft:
        none: list[int] = []
        text = next((text for text in texts if text[: len(token_ids)] == token_ids), none)
        draft = text[len(token_ids) : len(token_ids) + count]
        return Draft(8, [9 if (len(token_ids) + at) % 3 == 0 else token for at, token in enumerate(draft)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookup, "draft", guess)
        drafted, stats = run(runner.model, group, 3)
    group.stop_followers()
    return plain, drafted, stats.draft_tokens, stats.accepted_draft_tokens


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


def test_drafts_change_no_token_on_several_ranks(checkpoint_directory: Path) -> None:
    """Every rank computes the same draft tokens and samples the same tokens after them."""
    path = tiny_checkpoint("llama", checkpoint_directory)
    plain, drafted, num_drafts, num_accepted = run_ranks(2, answer_with_drafts, path)[0]
    assert drafted == plain
    assert 0 < num_accepted < num_drafts
