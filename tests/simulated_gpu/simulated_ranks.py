"""One of two ranks that share a simulated GPU, for test_simulated_gpu.py.

NCCL is not simulated, only what the ranks do around it. Tensors go through host memory; or, with the folder of a
simulated peer memory, all-reduces go through that memory, and CUDA graphs can capture all collectives. The number of
rounds decides how much is served: from the third on, blocks come back from the host.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from coatcheck.bench.setup.staged_communicator import StagedCommunicator
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.simulated_gpu.install import install
from tests.simulated_gpu.peers import SimulatedPeers
from tests.simulated_gpu.simulated_run import make, serve
from tests.simulated_gpu.tensors import DEVICE


class PeerRank(StagedCommunicator):
    """A rank whose collectives are operators on the device, as NCCL's are, so that graphs capture them."""

    supports_cuda_graphs = True

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        parts: list[Tensor] = torch.ops.simulated.all_gather(x, self.size)
        return torch.cat(parts, dim=dim)


def _all_gather(x: Tensor, size: int) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous())
    return parts


def main() -> None:
    rank, address, path, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    rounds, has_graphs = int(sys.argv[5]), sys.argv[6:] == ["graphs"]
    gpu = install()
    communicator: StagedCommunicator
    if folder:
        library = torch.library.Library("simulated", "DEF")
        library.define("all_gather(Tensor x, int size) -> Tensor[]")
        library.impl("all_gather", _all_gather, "CPU")
        communicator = PeerRank.join_staged(rank, 2, address)
        peers = SimulatedPeers(Path(folder), rank, 2, gpu, multicast=False)
        communicator.map_peer_memory(DEVICE)
    else:
        communicator = StagedCommunicator.join_staged(rank, 2, address)
    runner = make(path, DEVICE, "auto", communicator=communicator)
    if has_graphs:
        runner.graphs.capture()
    gpu.watch(runner.pool)
    if rank:
        follow_driver(runner, communicator)
    else:
        group = TpRunner(runner, communicator)
        said, restored = serve(runner, group, rounds)
        group.stop_followers()
        assert (restored > 0) == (rounds > 2) and (runner.graphs.steps > 0) == has_graphs
        if folder:  # the embedding's sum alone has no norm behind it
            assert set(peers.calls) == {"one-shot"}
            assert gpu.kernels["_all_reduce_norm"] > gpu.kernels["_rms_norm"] > 0, gpu.kernels
        print(json.dumps(said))
    runner.close()
    communicator.close()


if __name__ == "__main__":
    main()
