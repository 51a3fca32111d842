"""Loads checkpoints onto a simulated GPU, for test_simulated_gpu.py. Tensors of different devices do not mix there."""

from __future__ import annotations

import sys
from pathlib import Path

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from tests.simulated_gpu.install import install
from tests.simulated_gpu.tensors import DEVICE


def main() -> None:
    install()
    for path in sys.argv[1:]:
        model = load_model(Path(path), communicator=Communicator(), dtype="bfloat16", device=DEVICE)
        print(model.spec.architecture)


if __name__ == "__main__":
    main()
