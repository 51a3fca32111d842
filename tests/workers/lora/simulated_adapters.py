"""LoRA adapters on a simulated GPU with CUDA graphs, in a separate process; see test_stacked_adapters.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from coatcheck.workers.core.lora_module import LoraModule
from tests.simulated_gpu.install import install
from tests.simulated_gpu.simulated_run import make
from tests.workers.lora.adapted_answers import ask_each


def main() -> None:
    """Requests for all adapters and none together, and then one for none, are answered from the same graphs, and from
    steps between them that fit no graph."""
    path, modules, expected = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    gpu, device = install(), torch.device("cuda", 0)
    loaded = [LoraModule(name, folder) for name, folder in modules.items()]
    runner = make(path, device, "auto", lora_modules=loaded, num_blocks=24)
    runner.graphs.capture()
    runner.pool.fill_(255)
    gpu.waits.clear()
    launches, steps = gpu.launches.copy(), runner.graphs.steps
    for names in ([*expected], [""]):
        gpu.kernels.clear()
        said = ask_each(runner, runner, names)
        assert said == {name: expected[name] for name in names}, (said, expected)
        assert gpu.kernels["_shrink"] == gpu.kernels["_expand"] > 0
    assert set(gpu.waits) == {"event"}, set(gpu.waits)
    launched = gpu.launches - launches
    assert runner.graphs.steps - steps > 3, "few steps were graphs: this proves little"
    assert launched["kernel"] > 0, "no step ran without a graph: this proves little"
    print("agreed")


if __name__ == "__main__":
    main()
