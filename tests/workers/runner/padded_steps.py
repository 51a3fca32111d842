"""Serves the same requests with and without padded steps, for test_cuda_graphs.py.

As a module with TRITON_INTERPRET=1 it runs the Triton kernels in Triton's interpreter, and compares the tokens with
those of the CPU path, which the parent process passes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.kv_memory import allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner

SIZES = GraphSizes((2, 4, 8), (6, 12))
PROMPTS = [[3, 4, 5], [9], [7] * 9, [11, 12] * 5, [5] * 8]
SAMPLINGS = [
    SamplingParams(max_tokens=6, temperature=0.0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.9, top_p=0.8, top_k=20, seed=2, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=7, temperature=0.0, repetition_penalty=1.3, seed=3, ignore_eos=True),
    SamplingParams(
        max_tokens=6,
        temperature=0.8,
        min_p=0.02,
        frequency_penalty=0.4,
        logit_bias={7: 3.0},
        seed=4,
        bad_token_ids=((9,), (7, 7)),
    ),
    SamplingParams(max_tokens=5, temperature=1.1, allowed_token_ids=(3, 7, 20, 33), seed=5, logprobs=1),
]
Said = dict[str, list[int]]


def make_runner(
    model: Model,
    sizes: GraphSizes,
    kv_dtype: str = "auto",
    num_blocks: int = 24,
    attention_backend: str = "triton",
    communicator: Communicator | None = None,
) -> ModelRunner:
    """A runner whose pool is filled with NaN in every float format."""
    layout = BlockLayout.of(model.spec.layers, 8, choose_kv_dtype(kv_dtype, model.spec.dtype))
    pool = allocate_kv_pool(layout, num_blocks, torch.device("cpu"))
    pool.fill_(255)
    return ModelRunner(
        model, layout, pool, max_num_seqs=8, max_model_len=64, graph_sizes=sizes, attention_backend=attention_backend,
        communicator=communicator,
    )  # fmt: skip


def load(
    path: Path, dtype: str = "float32", *, deterministic: bool = False, communicator: Communicator | None = None,
    lora_modules: Sequence[LoraModule] = (),
) -> Model:  # fmt: skip
    """Several ranks divide latents by token."""
    communicator = communicator or Communicator()
    mla_shard = "tokens" if communicator.size > 1 else "replicate"
    return load_model(
        path, communicator=communicator, dtype=dtype, device="cpu", deterministic=deterministic, mla_shard=mla_shard,
        lora_modules=lora_modules,
    )  # fmt: skip


def serve(runner: ModelRunner, *, short: bool = False) -> tuple[Said, list[StepShape | None]]:
    """(each request's tokens, the shapes of the padded steps). `short`: two requests of three tokens."""
    count = 2 if short else len(PROMPTS)
    engine = Engine(
        runner.model.spec, runner, num_blocks=len(runner.pool), block_size=8, max_num_seqs=8, max_batch_tokens=12
    )
    for index, prompt in enumerate(PROMPTS[:count]):
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        if short:
            sampling = replace(sampling, max_tokens=3, top_p=1.0, top_k=0)
        engine.submit_request(EngineRequest(str(index), tuple(prompt), sampling))
    said: Said = {str(index): [] for index in range(count)}
    padded: list[StepShape | None] = []
    while engine.has_work:
        before = runner.graphs.steps
        for output in engine.step().outputs:
            said[output.request_id] += output.token_ids
        padded += [runner.graphs.last_shape] * (runner.graphs.steps - before)
    return said, padded


def padded_beside_plain(
    model: Model, kv_dtype: str = "auto", short: bool = False
) -> tuple[Said, Said, Tensor, Tensor, list[StepShape | None]]:
    """(tokens of plain steps, tokens of padded steps, both pools, the shapes of the padded steps)."""
    sizes = GraphSizes((4,), (16,)) if short else SIZES
    plain, padded = make_runner(model, GraphSizes(), kv_dtype), make_runner(model, sizes, kv_dtype)
    padded.graphs.capture()
    padded.pool.fill_(255)  # capturing ran once for each shape
    (want, none), (have, taken) = serve(plain, short=short), serve(padded, short=short)
    assert none == []
    return want, have, plain.pool, padded.pool, taken


def main() -> None:
    path, kv_dtype, expected = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    want, have, plain, padded, sizes = padded_beside_plain(load(path), kv_dtype, short=True)
    assert have == want == expected, (have, want, expected)
    assert sizes and torch.equal(plain, padded)
    print("agreed")


if __name__ == "__main__":
    main()
