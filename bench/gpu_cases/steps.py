"""Whole engine steps for bench/gpu.py: the host's milliseconds to launch one beside those that the device takes."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from coatcheck.bench.gpu_cases.clock import Roofs
from coatcheck.bench.gpu_cases.engine import BLOCK, Group, shapes, write_checkpoint
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model

_GREEDY = SamplingParams(temperature=0.0, seed=0)
_DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=0)


def steps(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Decodes of one and of many sequences, drawn by top-p too, prompts alone, and both in one step."""
    batch, context, chunk, long, times = (3, 40, 8, 20, 2) if quick else (64, 2048, 256, 1024, 20)
    one, many = [(context, 1)], [(context, 1)] * batch
    kinds = [
        ("batch 1, greedy", one, _GREEDY), (f"batch {batch}, greedy", many, _GREEDY),
        (f"batch {batch}, top-p", many, _DRAWN), (f"a prompt of {chunk}", [(0, chunk)], _GREEDY),
        (f"a prompt of {long}", [(0, long)], _GREEDY),
        (f"{chunk} of a prompt, {batch - 1} decodes", [*many[1:], (0, chunk)], _GREEDY),
        (f"16 of a prompt behind {context}, {batch - 1} decodes", [*many[1:], (context - 16, 16)], _GREEDY),
    ]  # fmt: skip
    with TemporaryDirectory() as scratch:
        shape = shapes(quick=quick)[-1]
        path = write_checkpoint(Path(scratch), shape, torch.bfloat16, device)
        model = load_model(path, communicator=Communicator(), dtype="bfloat16", device=device)
        blocks = -(-(context + 1) // BLOCK)
        group = Group(
            model, device, num_blocks=batch * blocks, max_num_seqs=batch, max_model_len=context + max(chunk, 2)
        )
        for what, rows, sampling in kinds:
            host, whole = _measure(group, rows, sampling, blocks, times)
            yield Measurement("steps", f"{shape.name}, {what}", whole * 1e3, beside="host", beside_ms=host * 1e3)


def _measure(
    group: Group, rows: list[tuple[int, int]], sampling: SamplingParams, blocks: int, times: int
) -> tuple[float, float]:
    """(seconds in which the host launches a step, seconds a step takes if steps follow one another).

    `rows`: (position, tokens) of each. Every step computes the same rows again.
    """
    scheduled = [ScheduledSequence(slot, start, n, needs_sample=True) for slot, (start, n) in enumerate(rows)]
    group.runner.launch(
        StepPlan(
            new_sequences=[
                NewSequence(slot, 0, sum(row), [5] * sum(row), sampling, ()) for slot, row in enumerate(rows)
            ],
            table_writes=[
                TableWrite(slot, index, slot * blocks + index) for slot in range(len(rows)) for index in range(blocks)
            ],
            scheduled=scheduled,
        )
    ).wait()
    plan = StepPlan(scheduled=scheduled)
    group.runner.launch(plan).wait()
    host, began = 0.0, time.perf_counter()
    launched = []
    for _ in range(times):
        started = time.perf_counter()
        launched.append(group.runner.launch(plan))
        host += time.perf_counter() - started
    for step in launched:
        step.wait()
    return host / times, (time.perf_counter() - began) / times
