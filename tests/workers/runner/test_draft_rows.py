"""A row that computes a draft token has the bits of the decode that it may replace."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from coatcheck.workers.core.prompt_lookup import NO_DRAFT, Draft, PromptLookup
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import EngineStats, TokenLogprob
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.runner.padded_steps import PROMPTS, SAMPLINGS, load, make_runner

Said = dict[str, tuple[list[int], list[TokenLogprob]]]


def serve(runner: ModelRunner, max_draft_tokens: int) -> tuple[Said, EngineStats]:
    """Each request's tokens and logprobs. All steps take equally long, so that rows of drafts are free."""
    ticks = count()
    engine = Engine(
        runner.model.spec, runner, num_blocks=len(runner.pool), block_size=8, max_num_seqs=8, max_batch_tokens=12,
        max_draft_tokens=max_draft_tokens, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.submit_request(EngineRequest(str(index), tuple(prompt), replace(sampling, max_tokens=20 + index)))
    said: Said = {str(index): ([], []) for index in range(len(PROMPTS))}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = said[output.request_id]
            tokens += output.token_ids
            logprobs += output.logprobs
        engine.check()
    return said, engine.stats()


def guess_from(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft the tokens that were said, every fourth one wrong."""
    texts = [prompt + said[str(index)][0] for index, prompt in enumerate(PROMPTS)]
    draws = random.Random(3)

    def guess(self: PromptLookup, token_ids: Sequence[int], count: int) -> Draft:
        known = list(token_ids)
        text = next((text for text in texts if text[: len(known)] == known), known)
        draft = [5 if draws.random() < 0.25 else token for token in text[len(known) : len(known) + count]]
        return Draft(8, draft) if draft else NO_DRAFT

    monkeypatch.setattr(PromptLookup, "draft", guess)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype"),
    [("llama", "float32", "auto"), ("llama", "bfloat16", "fp8"), ("gemma3", "bfloat16", "auto"),
     ("deepseek-v3", "float32", "auto"), ("qwen3-moe", "bfloat16", "int8"), ("mistral", "float32", "int4")],
)  # fmt: skip
def test_tokens_and_logprobs_are_those_of_decodes(
    checkpoint_directory: Path, arch: str, dtype: str, kv_dtype: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with penalties, biases, forbidden tokens and logprobs; guesses are right and wrong. Padded
    steps are those of CUDA graphs."""
    model = load(tiny_checkpoint(arch, checkpoint_directory), dtype)
    sizes = GraphSizes((2, 4, 8), (6, 12)) if is_padded else GraphSizes()
    plain, drafted = make_runner(model, sizes, kv_dtype, 40), make_runner(model, sizes, kv_dtype, 40)
    if is_padded:
        plain.graphs.capture()
        drafted.graphs.capture()
    said, none = serve(plain, 0)
    assert none.draft_tokens == 0
    guess_from(said, monkeypatch)
    again, stats = serve(drafted, 3)
    assert again == said
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.steps < none.steps
