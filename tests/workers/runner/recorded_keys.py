"""The Triton kernels that a runner launches, without a GPU, for test_kernel_keys.py, in a separate process.

Triton computes each launch's cache key for an sm_90 that a fake driver claims to have. Its hook before compilation
records the key and skips the compilation. So kernels compute nothing, and the plans bring their own tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from coatcheck.kernels import gpu_properties
from coatcheck.kernels.layers import linear
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.runner.graph_shapes import GraphSizes, capture_sizes
from tests.examples import examples
from tests.workers.runner.padded_steps import load, make_runner

_SEQS, _LEN, _BLOCKS = 8, 64, 24


class ClaimedGpu:
    """The part of an sm_90's driver that a launch needs before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Records kernel name and key of every launch."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        gpu_properties.TRITON_DEVICES.add("cpu")
        triton.runtime.driver.set_active(ClaimedGpu())
        triton.knobs.runtime.jit_cache_hook = self._record

    def _record(self, *, key: Any, repr: str, fn: Any, **others: Any) -> bool:
        self.keys.add(f"{fn.name} {key}")
        return True


def random_plans(seed: int, num_adapters: int) -> Iterator[StepPlan]:
    """Random steps: chunks and decodes of any length, every sampling, copies, prompt logprobs, adapters and none."""
    rng = random.Random(seed)
    for _ in range(examples(20)):
        news, writes, rows = [], [], []
        decoding = rng.random() < 0.4
        for slot in rng.sample(range(_SEQS), rng.randint(1, _SEQS)):
            count = rng.randint(1, 3) if rng.random() < 0.5 else rng.randint(1, _LEN - 2)
            start = rng.randint(0, _LEN - 1 - count)
            count = 1 if decoding else count
            length = start + count
            sampling = SamplingParams(
                seed=rng.getrandbits(64), temperature=rng.choice((0.0, 0.7)), top_k=rng.choice((0, 3)),
                top_p=rng.choice((1.0, 0.9)), min_p=rng.choice((0.0, 0.1)),
                repetition_penalty=rng.choice((1.0, 1.2)), frequency_penalty=rng.choice((0.0, 0.5)),
                logit_bias=rng.choice(({}, {3: 1.0})), logprobs=rng.choice((None, 0, 2)),
                prompt_logprobs=rng.choice((None, None, None, 1)),
            )  # fmt: skip
            adapter = rng.randint(0, num_adapters) if num_adapters else 0
            prompt = rng.randint(1, length)
            news.append(NewSequence(slot, 0, prompt, [5] * length, sampling, (), adapter=adapter))
            writes += [TableWrite(slot, index, rng.randrange(_BLOCKS)) for index in range(-(-length // 8))]
            rows.append(ScheduledSequence(slot, start, count, needs_sample=decoding or rng.random() < 0.8))
        cow_copies = [(2 * i, 2 * i + 1) for i in range(rng.choice((0, 0, 1, 2, 3)))]
        yield StepPlan(new_sequences=news, table_writes=writes, cow_copies=cow_copies, scheduled=rows)


def record(communicator: Communicator, model_of: tuple[Path, str, str, bool]) -> tuple[set[str], set[str]]:
    """(keys of the warm-up, keys of serving) for a (checkpoint, dtype, kv dtype, deterministic). Several ranks divide
    the latents by token. Folders beside the checkpoint whose names begin with "adapter" are LoRA adapters."""
    path, dtype, kv_dtype, is_deterministic = model_of
    torch.use_deterministic_algorithms(True, warn_only=True)
    recorder = Recorder()
    if is_deterministic:  # linears keep the plain weight, as on a GPU
        linear._pick_form = lambda dtype: "plain"
    adapters = [LoraModule(folder.name, str(folder)) for folder in sorted(path.parent.glob("adapter *"))]
    model = load(path, dtype, deterministic=is_deterministic, communicator=communicator, lora_modules=adapters)
    sizes = capture_sizes(_SEQS, 48, 512) if model.supports_cuda_graphs else GraphSizes()
    runner = make_runner(model, sizes, kv_dtype, _BLOCKS)
    runner.warm_up()
    warmed, recorder.keys = recorder.keys, set()
    for plan in random_plans(7, len(adapters)):
        runner.launch(plan)
    return warmed, recorder.keys
