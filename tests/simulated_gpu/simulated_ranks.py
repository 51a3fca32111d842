"""One of two ranks that share a simulated GPU, for test_simulated_gpu.py.

NCCL is not simulated, only what the ranks do around it. Tensors go through host memory; or, with the folder of a
simulated peer memory, all-reduces go through that memory, and CUDA graphs can capture all collectives. The number of
rounds decides how much is served: from the third on, blocks come back from the host. With "graphs" steps are graphs;
with "failed-capture" rank 1 cannot capture the second; with "failed-call" it fails while rank 0 waits in a collective.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from coatcheck.bench.setup.staged_communicator import StagedCommunicator
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.runner import cuda_graphs
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver
from tests.simulated_gpu.gpu import SimulatedGpu
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


def _failing(forward: Callable[[StepShape], None], gpu: SimulatedGpu, *, capture: bool) -> Callable[[StepShape], None]:
    """`forward`, which fails in its second capture, or if not `capture` before the collectives of its first call."""
    captured = []

    def fail(shape: StepShape) -> None:
        if not capture:
            raise RuntimeError("the kernel failed")
        forward(shape)  # also in a capture, where the simulated GPU, unlike others, runs the collectives
        if gpu.capturing is not None:
            captured.append(shape)
            if len(captured) == 2:
                raise RuntimeError("operation not permitted when stream is capturing")

    return fail


def _capture(runner: ModelRunner, rank: int, gpu: SimulatedGpu, failing: str) -> None:
    """Capture the graphs; `failing`: on rank 1."""
    if failing and rank == 1:
        capture = failing == "failed-capture"
        runner.graphs._forward = _failing(runner.graphs._forward, gpu, capture=capture)  # type: ignore[method-assign,assignment]
    with patch.object(cuda_graphs._log, "warning") as warning:
        runner.graphs.capture()
    if not failing:
        assert not warning.called
    elif rank == 0:
        message, *words = warning.call_args.args
        assert message % tuple(words) == (
            "no CUDA graphs, so each step launches every kernel: LlamaForCausalLM "
            "(rank 1: operation not permitted when stream is capturing)"
        )
    assert warning.call_count == (bool(failing) and rank == 0)


def main() -> None:
    rank, address, path, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    rounds, captures, failing = int(sys.argv[5]), bool(sys.argv[6:]), "".join(sys.argv[6:]).removeprefix("graphs")
    has_graphs = captures and not failing
    gpu = install()
    communicator: StagedCommunicator
    if folder:
        library = torch.library.Library("simulated", "DEF")
        library.define("all_gather(Tensor x, int size) -> Tensor[]")
        library.impl("all_gather", _all_gather, "CPU")
        seconds = 30.0 if failing == "failed-call" else 60.0
        communicator = PeerRank.join_staged(rank, 2, address, timeout_seconds=seconds)
        peers = SimulatedPeers(Path(folder), rank, 2, gpu, multicast=False)
        communicator.map_peer_memory(DEVICE)
    else:
        communicator = StagedCommunicator.join_staged(rank, 2, address)
    runner = make(path, DEVICE, "auto", communicator=communicator)
    communicator.barrier()
    if failing == "failed-call":
        try:
            _capture(runner, rank, gpu, failing)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(0)
        raise AssertionError("the capture did not fail")
    if captures:
        _capture(runner, rank, gpu, failing)
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
