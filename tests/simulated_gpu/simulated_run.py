"""The GPU path of a runner on a simulated GPU, for test_simulated_gpu.py, in a separate process.

It serves the requests that the CPU path served before, with Triton's interpreter, CUDA graphs, transfers and the
copier's stream, and compares the tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.kernels.kv.recurrent_state import RecurrentState
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.runner_protocol import CopyStatus
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan, TableWrite
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.model.model import load_model
from coatcheck.workers.runner import cuda_graphs
from coatcheck.workers.runner.block_copier import BlockCopier, CpuBlockCopier, CudaBlockCopier
from coatcheck.workers.runner.graph_shapes import GraphSizes
from coatcheck.workers.runner.host_transfer import HostCopy
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool
from coatcheck.workers.runner.model_runner import ModelRunner
from coatcheck.workers.runner.tp_runner import TpRunner
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.install import install
from tests.simulated_gpu.late_thread import LateThread
from tests.simulated_gpu.memory import Hazard
from tests.simulated_gpu.pinned import Pinned
from tests.simulated_gpu.streams import Stream

_BLOCKS, _HOST_BLOCKS, _SIZE = 7, 16, 8
_GREEDY = SamplingParams(temperature=0.0, max_tokens=2, seed=1, ignore_eos=True)
_DRAWN = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=30, max_tokens=3, seed=7, ignore_eos=True, logprobs=2, repetition_penalty=1.2
)
_BASE = list(range(3, 19))
# One after another: the second round demotes blocks that the third restores.
_ROUNDS: list[list[tuple[list[int], SamplingParams]]] = [
    [([*_BASE, 5, 6, 7], _GREEDY), ([40] * 9, _DRAWN)],
    [([60] * 41, _GREEDY)],
    [([*_BASE, 9], _GREEDY), ([40] * 9, _DRAWN), ([8] * 3, _GREEDY)],
]


def make(
    path: Path,
    device: torch.device,
    kv_dtype: str,
    *,
    deterministic: bool = False,
    communicator: Communicator | None = None,
    lora_modules: Sequence[LoraModule] = (),
    num_blocks: int = _BLOCKS,
) -> ModelRunner:
    ranks = communicator or Communicator()
    model = load_model(
        path, communicator=ranks, dtype="float32", device=device, deterministic=deterministic,
        lora_modules=lora_modules,
    )  # fmt: skip
    layout = BlockLayout.of(model.spec.layers, _SIZE, choose_kv_dtype(kv_dtype, model.spec.dtype))
    pool = allocate_kv_pool(layout, num_blocks, device)
    host = allocate_host_pool(_HOST_BLOCKS, layout.bytes_per_block, device)
    copier: BlockCopier = (
        CpuBlockCopier(pool, host, ranks) if device.type == "cpu" else CudaBlockCopier(pool, host, ranks, LateThread())
    )  # fmt: skip
    return ModelRunner(
        model, layout, pool, max_num_seqs=4, max_model_len=64,
        graph_sizes=GraphSizes((2, 4), (8, 24)) if model.supports_cuda_graphs else GraphSizes(),
        copier=copier, communicator=communicator,
    )  # fmt: skip


def serve(
    runner: ModelRunner, group: TpRunner | None = None, rounds: int = len(_ROUNDS)
) -> tuple[list[list[int]], int]:
    """(the tokens of each request, the number of restored blocks). `rounds`: how many of the first rounds."""
    engine = Engine(
        runner.model.spec, group or runner, num_blocks=_BLOCKS, host_blocks=_HOST_BLOCKS, block_size=_SIZE,
        max_num_seqs=4, max_batch_tokens=24, pipeline_depth=1,
    )  # fmt: skip
    said: dict[str, list[int]] = {}
    for number, requests in enumerate(_ROUNDS[:rounds]):
        for prompt, sampling in requests:
            engine.submit_request(EngineRequest(name := f"{number} {prompt}", tuple(prompt), sampling))
            said[name] = []
        while engine.has_work:
            for output in engine.step().outputs:
                said[output.request_id] += output.token_ids
        engine.check()
    return list(said.values()), engine.stats().restores


def check_rules(runner: ModelRunner, gpu: SimulatedGpu, want: list[list[int]]) -> None:
    """Tokens equal `want`; the host waits for host copies only; both streams use the pool."""
    runner.graphs.capture()
    gpu.watch(runner.pool)
    runner.pool.fill_(255)  # NaN in every float format, in place of what capturing wrote
    gpu.waits.clear()
    have, restored = serve(runner)
    assert have == want, (have, want)
    assert set(gpu.waits) == {"event"}, set(gpu.waits)
    assert restored > 0 and len(gpu.watched[0].streams()) == 2, "no block was restored: this proves nothing"
    assert (runner.graphs.steps > 0) == bool(runner.graphs.shapes)


def check_states(runner: ModelRunner, gpu: SimulatedGpu, want: list[list[int]]) -> None:
    """The layers of a hybrid model that keep states: tokens equal `want`, whatever the slots held before."""
    runner.graphs.capture()
    runner.pool.fill_(255)
    states = [cache for cache in runner._layer_caches if isinstance(cache, RecurrentState)]
    for state in states:
        for tensor in state.tensors:
            tensor.fill_(float("nan"))
    gpu.waits.clear()
    gpu.kernels.clear()
    have, _ = serve(runner)
    assert have == want, (have, want)
    assert set(gpu.waits) == {"event"}, set(gpu.waits)
    is_ours = any(gpu.kernels[name] for name in ("_compute_tokens", "_step_heads", "_convolve_gated"))
    assert is_ours and runner.graphs.steps > 0, "no graph was replayed: this proves nothing"


@contextmanager
def hazard(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the interpreter wraps what comes out of a kernel
        assert isinstance(error, Hazard) or "Hazard" in repr(error), repr(error)
        assert what in repr(error), (what, repr(error))
        return
    raise AssertionError(f"no hazard was found: {what}")


def check_that_missing_waits_are_found(fresh: Callable[[], ModelRunner], gpu: SimulatedGpu) -> None:
    """Each hazard is found if a wait is left out."""
    row = NewSequence(0, 0, 9, [5] * 9, _GREEDY, ())
    writes = [TableWrite(0, 0, 0), TableWrite(0, 1, 1)]
    plain = StepPlan(
        new_sequences=[row], table_writes=writes, scheduled=[ScheduledSequence(0, 0, 9, needs_sample=True)]
    )
    out = StepPlan(
        new_sequences=[row],
        table_writes=writes,
        scheduled=[ScheduledSequence(0, 0, 9, needs_sample=True)],
        demotes=[(0, 0)],
    )
    back = StepPlan(restores=[(0, 1)])

    def watched() -> ModelRunner:
        runner = fresh()
        gpu.watch(runner.pool)
        return runner

    gpu.streams_wait = False
    runner = watched()
    runner.launch(plain).wait()
    with hazard("a copy to the host"):  # of a staging buffer that is still being filled
        runner.launch(out)
    runner = watched()
    runner.launch(plain)
    with hazard("a copy to the host"):  # of a block that a step still computes
        runner.launch(StepPlan(demotes=[(0, 0)]))
    gpu.streams_wait, gpu.host_waits = True, False
    tokens = fresh().launch(plain).wait().token_ids
    assert tokens == [int.from_bytes(b"\xab" * 8, "little", signed=True)], tokens
    runner = fresh()
    runner.launch(StepPlan(demotes=[(0, 0)]))
    with hazard("another"):  # a restore before its demote has arrived
        runner.wait_for_copies()
        runner.launch(back)
        runner.wait_for_copies()
    gpu.host_waits = True


def check_that_graphs_are_watched(runner: ModelRunner, gpu: SimulatedGpu) -> None:
    """Steps that are graphs raise a hazard too: a mixed step beside a demotion's staging buffer, the sampler's tokens
    and the step's inputs where another step reuses their memory, and memory that was freed since the capture."""
    runner.graphs.capture()
    gpu.watch(runner.pool)
    news = [NewSequence(slot, 0, 9, [5] * 9, _DRAWN if slot else _GREEDY, ()) for slot in range(2)]
    writes = [TableWrite(slot, index, 2 * slot + index) for slot in range(2) for index in range(2)]
    first = StepPlan(new_sequences=news, table_writes=writes, scheduled=[ScheduledSequence(0, 0, 9, needs_sample=True)])
    rows = [ScheduledSequence(0, 9, 1, needs_sample=True), ScheduledSequence(1, 0, 9, needs_sample=True)]
    runner.launch(first).wait()
    gpu.streams_wait = False
    with hazard("a copy to the host"):  # of a staging buffer that is still being filled
        runner.launch(StepPlan(scheduled=rows, demotes=[(0, 0)]))
    gpu.streams_wait = True
    gpu.wait_for_all()
    steps = runner.graphs.steps
    runner.launch(StepPlan(scheduled=rows))
    assert runner.graphs.steps == steps + 1, "no graph was replayed: this proves nothing"
    tokens, main, side = runner.graphs._tokens[:2], gpu.current_stream(), Stream()
    with gpu.on(side), hazard("a copy to the host"):  # of tokens that are still to be sampled
        HostCopy.start(tokens)
    side.wait_stream(main)
    with gpu.on(side):
        copied = HostCopy.start(tokens)
    decodes = StepPlan(scheduled=[ScheduledSequence(slot, 10 - slot, 1, needs_sample=True) for slot in range(2)])
    with hazard("has not waited"):  # the next step samples into memory that is still being copied
        runner.launch(decodes)
    copied.wait()
    runner.launch(decodes).wait()
    reused = torch.zeros(len(runner.graphs._inputs), dtype=torch.int32).pin_memory()
    with patch.object(cuda_graphs, "upload_into", partial(_upload_from, reused)):
        runner.launch(decodes)
        with hazard("pinned memory was changed"):  # the next step's inputs overwrite those that are being uploaded
            runner.launch(StepPlan(scheduled=rows)).wait()
    gpu.pinned = Pinned()
    runner.graphs._logits = runner.graphs._logits.clone()
    with hazard("freed"):
        runner.launch(decodes)


def _upload_from(pinned: Tensor, target: Tensor, values: NDArray[np.int32]) -> None:
    """As upload_into, from one pinned buffer for all steps."""
    pinned[: len(values)].copy_(torch.from_numpy(values))
    target[: len(values)].copy_(pinned[: len(values)], non_blocking=True)


def check_that_a_turned_bit_is_found(runner: ModelRunner) -> None:
    """Of two restored blocks the one that changed in host memory is corrupt."""
    copier = runner._copier
    assert copier is not None
    for plan in (StepPlan(demotes=[(0, 0), (1, 1)]), StepPlan(restores=[(0, 2), (1, 3)])):
        copier.start_copies(plan)
        statuses: list[CopyStatus] = []
        while (report := copier.report_copies()) is not None:
            statuses = list(report.statuses)
        copier.host[1, 100] ^= 1
    assert statuses == [CopyStatus.DONE, CopyStatus.CORRUPT], statuses


def main() -> None:
    path, kv_dtype, want = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    gpu, device = install(), torch.device("cuda", 0)
    if "states" in sys.argv:
        check_states(make(path, device, kv_dtype, deterministic="deterministic" in sys.argv), gpu, want)
        print("agreed")
        return
    check_rules(make(path, device, kv_dtype, deterministic="deterministic" in sys.argv), gpu, want)
    check_that_a_turned_bit_is_found(make(path, device, kv_dtype))
    if "forget" in sys.argv:
        check_that_missing_waits_are_found(lambda: make(path, device, kv_dtype), gpu)
        check_that_graphs_are_watched(make(path, device, kv_dtype), gpu)
    print("agreed")


if __name__ == "__main__":
    main()
