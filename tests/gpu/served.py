"""serve_tiny(): what the engine answers over a tiny checkpoint, on a GPU or on the CPU.

The pool is so small that requests are preempted and blocks go to the host tier. Prompts share prefixes and are
computed in chunks beside decodes. Requests have the model's adapters in turn, and none. On a GPU steps are replayed
from CUDA graphs.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.block_copier import make_copier
from coatcheck.workers.runner.graph_shapes import GraphSizes, capture_sizes
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from tests.workers.checkpoints import VOCAB

_BLOCK, _BLOCKS, _HOST_BLOCKS, _SEQUENCES, _BUDGET, _SNAPSHOTS = 16, 11, 64, 4, 48, 4
_LONGEST = 160
_TOKENS = 12
_CROWD_TOKENS = 36
_GREEDY = SamplingParams(temperature=0.0, max_tokens=_TOKENS, seed=1, ignore_eos=True, logprobs=0)
_DRAWN = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=30, max_tokens=_TOKENS, seed=7, ignore_eos=True, logprobs=2,
    repetition_penalty=1.2,
)  # fmt: skip
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)

# Its experts run transformers' code, whose products of float32 wait for the device.
_WITHOUT_GRAPHS = ("NemotronHForCausalLM",)

Answer = tuple[list[int], list[float]]  # tokens, and the log-probability of each


@dataclass(frozen=True, slots=True)
class Served:
    """`greedy`, `drawn`: the answer to each prompt. `scores`: log-probabilities of the tokens of two prompts.

    `counts`: what happened in the engine, by name."""

    greedy: list[Answer]
    drawn: list[Answer]
    scores: list[float]
    counts: dict[str, int]


@cache
def make_prompts(longest: int) -> list[list[int]]:
    """Repeated, forked, short and long prompts; none is longer than `longest`."""
    source = random.Random(1)

    def draw(length: int) -> list[int]:
        return [source.randrange(3, VOCAB) for _ in range(length)]

    base = draw(70)
    every = [base, base, draw(41), [*base[:48], 5, 6, 7], [9], draw(120), base]
    return [prompt[:longest] for prompt in every]


def _make_crowd() -> list[list[int]]:
    """Prompts that the pool holds together; it does not hold their answers of _CROWD_TOKENS, so some are preempted."""
    source = random.Random(2)
    return [[source.randrange(3, VOCAB) for _ in range(31)] for _ in range(_SEQUENCES)]


PROMPTS_SCORED = make_prompts(_LONGEST - _TOKENS)[-2:]  # of models that serve _LONGEST tokens


def serve_tiny(
    path: Path, device: torch.device, *, dtype: str = "float32", kv: str = "auto", deterministic: bool = False,
    brief: bool = False, **settings: Any,
) -> Served:  # fmt: skip
    """Raises InvalidModel and InvalidConfig. `brief`: fewer prompts. `settings`: of `load_model`."""
    model = load_model(
        path, communicator=Communicator(), dtype=dtype, device=device, deterministic=deterministic, kv_dtype=kv,
        **settings,
    )  # fmt: skip
    engine, runner = _make_engine(model, device, kv)
    longest = min(_LONGEST, model.spec.max_model_len)
    asked = make_prompts(longest - _TOKENS)
    if brief:
        asked = asked[2:6]
    crowd = [] if brief or longest < _LONGEST else _make_crowd()
    crowded, _ = _run(engine, crowd, replace(_GREEDY, max_tokens=_CROWD_TOKENS))
    greedy, _ = _run(engine, asked, _GREEDY)
    drawn, _ = _run(engine, asked[:2] if brief else asked, _DRAWN)
    _, scores = _run(engine, asked[-2:], _SCORED)
    stats = engine.stats()
    counts = {
        "preemptions": stats.preemptions,
        "cached tokens": stats.cached_device_tokens,
        "restores": stats.restores,
        "graph steps": runner.graphs.steps,
    }
    has_graphs = device.type == "cuda" and model.spec.architecture not in _WITHOUT_GRAPHS
    assert runner.graphs.steps > 0 or not has_graphs, "no step was replayed from a CUDA graph"
    assert stats.preemptions > 0 or not crowd, "no sequence was preempted"
    runner.close()
    return Served(crowded + greedy, drawn, scores, counts)


def _make_engine(model: Model, device: torch.device, kv: str) -> tuple[Engine, ModelRunner]:
    spec = model.spec
    layout = BlockLayout.of(spec.layers, _BLOCK, choose_kv_dtype(kv, spec.dtype))
    pool = allocate_kv_pool(layout, _BLOCKS, device)
    host_blocks, snapshots = (0, _SNAPSHOTS) if spec.state_layers else (_HOST_BLOCKS, 0)
    host = allocate_host_pool(host_blocks, layout.bytes_per_block, device) if host_blocks else None
    has_graphs = device.type == "cuda" and model.supports_cuda_graphs
    longest = min(_LONGEST, spec.max_model_len)
    runner = ModelRunner(
        model, layout, pool, max_num_seqs=_SEQUENCES, max_model_len=longest,
        graph_sizes=capture_sizes(_SEQUENCES, _BUDGET, 512) if has_graphs else GraphSizes(),
        copier=None if host is None else make_copier(pool, host, Communicator()), num_snapshots=snapshots,
    )  # fmt: skip
    runner.warm_up()
    engine = Engine(
        spec, runner, num_blocks=_BLOCKS, block_size=_BLOCK, max_num_seqs=_SEQUENCES, max_batch_tokens=_BUDGET,
        max_model_len=longest, host_blocks=host_blocks, num_snapshots=snapshots,
        pipeline_depth=1 if device.type == "cuda" else 0,
    )  # fmt: skip
    return engine, runner


def _run(engine: Engine, asked: list[list[int]], sampling: SamplingParams) -> tuple[list[Answer], list[float]]:
    """(answers, log-probabilities of the tokens of all prompts)"""
    answers: list[Answer] = [([], []) for _ in asked]
    scores: list[list[float]] = [[] for _ in asked]
    adapters = ("", *(adapter.name for adapter in engine.spec.adapters))
    for index, prompt in enumerate(asked):
        adapter = adapters[index % len(adapters)]
        engine.submit_request(EngineRequest(str(index), tuple(prompt), sampling, adapter=adapter))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs = answers[int(output.request_id)]
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs]
            scores[int(output.request_id)] += [one.logprob for one in output.prompt_logprobs]
    engine.check()
    return answers, [score for each in scores for score in each]
