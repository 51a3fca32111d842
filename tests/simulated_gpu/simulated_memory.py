"""The size of a KV pool on a simulated GPU, for test_simulated_gpu.py, in a separate process.

A rank measures its largest step and takes the rest of its share of the GPU, less what its attention backend may need
for other steps. Requests of every kind, at the limits of the rank, then take no more memory.
"""

from __future__ import annotations

import sys

from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.rank_loading import build_engine, load_rank
from coatcheck.workers.runner.triton_backend import TritonBackend
from tests.simulated_gpu.install import install
from tests.simulated_gpu.tensors import DEVICE

_SHARE, _UNMEASURED = 0.75, 5000
_SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True),
    SamplingParams(
        max_tokens=4, seed=1, ignore_eos=True, top_p=0.9, top_k=7, repetition_penalty=1.1, logit_bias={3: 1.0},
        logprobs=20,
    ),
    SamplingParams(max_tokens=3, seed=1, ignore_eos=True, prompt_logprobs=20),
]  # fmt: skip


def main() -> None:
    gpu = install()
    gpu.total_bytes = 1 << 23
    config = GroupConfig(
        "g", sys.argv[1], "tiny", kv_memory=1.0, gpu_memory_utilization=_SHARE, dtype="float32", device="cuda",
        max_num_seqs=4, max_batch_tokens=32, max_model_len=64,
    )  # fmt: skip
    TritonBackend.unmeasured_bytes = _UNMEASURED
    loaded = load_rank(config, Communicator(), DEVICE, ranks_on_host=1, compile_watch=CompileWatch())
    free, total = gpu.mem_get_info()
    left = _SHARE * total - (total - free) - _UNMEASURED
    assert 0 <= left < loaded.memory.layout.bytes_per_block + 1024, (left, loaded.memory.num_blocks)
    engine = build_engine(config, loaded, loaded.runner)
    for length in (60, 1):
        for number in range(6):
            sampling = _SAMPLINGS[number % len(_SAMPLINGS)]
            engine.submit_request(EngineRequest(f"{length} {number}", tuple([number] * length), sampling))
        while engine.has_work:
            engine.step()
    assert gpu.mem_get_info() == (free, total), (free - gpu.mem_get_info()[0], "bytes more than at the start")
    print("agreed")


if __name__ == "__main__":
    main()
