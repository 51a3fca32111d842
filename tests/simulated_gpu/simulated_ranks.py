"""One of two ranks that share a simulated GPU, for test_simulated_gpu.py.

Their tensors go through host memory: NCCL is not simulated, only what the ranks do around it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coatcheck.bench.setup.staged_communicator import StagedCommunicator
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.simulated_gpu.install import install
from tests.simulated_gpu.simulated_run import make, serve
from tests.simulated_gpu.tensors import DEVICE


def main() -> None:
    rank, address, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    install()
    communicator = StagedCommunicator.join_staged(rank, 2, address)
    runner = make(path, DEVICE, "auto", communicator=communicator)
    if rank:
        follow_driver(runner, communicator)
    else:
        group = TpRunner(runner, communicator)
        said, restored = serve(runner, group)
        group.stop_followers()
        assert restored > 0, "no block was restored: this proves nothing"
        print(json.dumps(said))
    communicator.close()


if __name__ == "__main__":
    main()
