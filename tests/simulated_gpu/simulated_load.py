"""Loads checkpoints onto a simulated GPU, for test_simulated_gpu.py. Tensors of different devices do not mix there.

With the argument `capture` and a file with a JSON object, path of a checkpoint -> the tokens of each request, it
captures each model's steps too, serves the requests, and compares the tokens. Prints a line for each checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from tests.simulated_gpu.install import install
from tests.simulated_gpu.simulated_run import make, serve
from tests.simulated_gpu.tensors import DEVICE


def main() -> None:
    install()
    if sys.argv[1] == "capture":
        for path, want in json.loads(Path(sys.argv[2]).read_text()).items():
            check_graphs(Path(path), want)
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


if __name__ == "__main__":
    main()
