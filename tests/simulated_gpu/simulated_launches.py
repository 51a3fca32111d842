"""What the host launches in a step on a simulated GPU, with CUDA graphs and without, in a separate process.

Prints one JSON object for each kind of sampling, greedy first: kind of step -> [launches with graphs, launches without,
attention kernels with graphs].
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.install import install
from tests.simulated_gpu.simulated_run import make

_SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.5, seed=1),
)
_STEPS = {
    "two decodes": [(0, 9, 1), (1, 5, 1)],
    "a prompt": [(2, 0, 20)],
    "a decode and a prompt": [(0, 10, 1), (2, 0, 20)],
}


def main() -> None:
    gpu = install()
    with_graphs, without = (count(Path(sys.argv[1]), gpu, has_graphs=has_graphs) for has_graphs in (True, False))
    for graphs, plain in zip(with_graphs, without, strict=True):
        print(json.dumps({kind: [graphs[kind][0], plain[kind][0], graphs[kind][1]] for kind in _STEPS}))


def count(path: Path, gpu: SimulatedGpu, *, has_graphs: bool) -> list[dict[str, tuple[dict[str, int], int]]]:
    """For each sampling: kind of step -> (launches by kind, attention kernels)."""
    runner = make(path, torch.device("cuda", 0), "auto")
    if has_graphs:
        runner.graphs.capture()
    writes = [TableWrite(0, 0, 0), TableWrite(0, 1, 1), TableWrite(1, 0, 2)]
    writes += [TableWrite(2, index, 3 + index) for index in range(3)]
    prompts = [ScheduledSequence(slot, 0, length, needs_sample=True) for slot, length in ((0, 9), (1, 5))]
    found = []
    for sampling in _SAMPLINGS:
        news = [NewSequence(slot, 0, length, [5] * length, sampling, ()) for slot, length in enumerate((9, 5, 20))]
        runner.launch(StepPlan(new_sequences=news, table_writes=writes, scheduled=prompts)).wait()
        kinds = {}
        for kind, rows in _STEPS.items():
            launches, kernels = Counter(gpu.launches), Counter(gpu.kernels)
            runner.launch(StepPlan(scheduled=[ScheduledSequence(*row, needs_sample=True) for row in rows])).wait()
            kinds[kind] = (dict(gpu.launches - launches), (gpu.kernels - kernels)["_tiles"])
        found.append(kinds)
    return found


if __name__ == "__main__":
    main()
