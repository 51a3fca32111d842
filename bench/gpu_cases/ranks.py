"""The host tier and several ranks for bench/gpu.py: checksums over CUDA streams, gloo and NCCL."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from coatcheck.bench.gpu_cases.clock import Roofs
from coatcheck.bench.gpu_cases.engine import Group, Outputs, Shape, prompts_of, serve, tiny_config, write_checkpoint
from coatcheck.bench.gpu_cases.rank_processes import WAIT_SECONDS, run_rank_processes
from coatcheck.bench.gpu_cases.table import Measurement
from coatcheck.bench.setup.staged_communicator import StagedCommunicator
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.runner_protocol import CopyStatus
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import Model, load_model
from coatcheck.workers.runner.block_copier import BlockCopier, make_copier
from coatcheck.workers.runner.kv_memory import allocate_host_pool
from coatcheck.workers.runner.tp_runner import TpRunner, follow_driver

_GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, seed=3)


def tiers(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """Copies to pinned memory and back on a separate stream: equal bytes, bandwidth, and a corrupt block."""
    count, size = (8, 4096) if quick else (256, 2 << 20)
    pool = torch.randint(0, 255, (count, size), dtype=torch.uint8, device=device)
    before = pool.clone()
    host = allocate_host_pool(count, size, device)
    copier = make_copier(pool, host, Communicator())
    pairs = [(i, count - 1 - i) for i in range(count)]
    back = [(host_block, block) for block, host_block in pairs]
    for way, plan in (("to the host", StepPlan(demotes=pairs)), ("back", StepPlan(restores=back))):
        equal = True
        for _ in range(2):  # the first is slower: pages and streams are new
            started = time.perf_counter()
            copier.start_copies(plan)
            if way == "to the host":
                pool.zero_()  # on the compute stream, like a step that reuses the blocks
            statuses = _wait_for_copies(copier, count)
            took = time.perf_counter() - started
            equal &= way == "to the host" or torch.equal(pool, before)
            pool.copy_(before) if way == "to the host" else pool.zero_()
        pool.zero_()
        good = equal and set(statuses) == {CopyStatus.DONE}
        rate = f"{count * size / took / 1e9:.1f} GB/s with checksums"
        yield Measurement(
            "tiers",
            f"{count} blocks of {size >> 10} KiB {way}",
            took * 1e3,
            error=float(not good),
            target="equal bytes",
            met=good,
            note=rate,
        )
    host[3, 100] ^= 1
    copier.start_copies(StepPlan(restores=back))
    statuses = _wait_for_copies(copier, count)
    broken = [index for index, status in enumerate(statuses) if status is CopyStatus.CORRUPT]
    right = [host_block for host_block, _ in back].index(3)
    yield Measurement(
        "tiers",
        "a bit turned in host memory is found",
        error=float(broken != [right]),
        target="one block",
        met=broken == [right],
    )
    yield _tiered_tokens(device)


def _wait_for_copies(copier: BlockCopier, count: int) -> list[CopyStatus]:
    """Wait for `count` copies. Return their statuses, in order."""
    statuses: list[CopyStatus] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(statuses) < count:
        assert time.monotonic() < deadline, "copies do not end"
        report = copier.report_copies()
        statuses += [] if report is None else [s for s in report.statuses if s is not CopyStatus.IN_PROGRESS]
    return statuses


def _tiered_tokens(device: torch.device) -> Measurement:
    """Tokens of repeated prompts with a pool too small for all of them, against a pool that holds them."""
    with TemporaryDirectory() as scratch:
        path = write_checkpoint(Path(scratch), _tiny(), torch.float32, device)
        model = load_model(path, communicator=Communicator(), dtype="float32", device=device)
        prompts = prompts_of(6, 100, 512)
        small = Group(model, device, num_blocks=24, host_blocks=64, max_num_seqs=4, max_model_len=256)
        engine, want = small.engine(budget=128), _tokens(serve(_large(model, device).engine(), prompts, _GREEDY))
        unlike = sum(_tokens(serve(engine, prompts, _GREEDY)) != want for _ in range(3))
        restored = engine.stats().restores
        return Measurement(
            "tiers",
            "tokens through a small pool and the host, three times",
            error=unlike,
            target="equal",
            met=unlike == 0 and restored > 0,
            note=f"{restored} blocks came back",
        )


def ranks(device: torch.device, roofs: Roofs, *, quick: bool) -> Iterator[Measurement]:
    """float32 tokens of two ranks on one device over the host's memory and over gloo, and of one rank over NCCL."""
    with TemporaryDirectory() as scratch:
        path = write_checkpoint(Path(scratch), _tiny(), torch.float32, device)
        model = load_model(path, communicator=Communicator(), dtype="float32", device=device)
        want = _tokens(serve(_large(model, device).engine(), prompts_of(5, 90, 512), _GREEDY))
        del model
        for share in (False, True):
            transport, have = _run_ranks(path, device, share)
            yield Measurement(
                "ranks",
                f"tp 2 on one device over {transport}: tokens unlike tp 1's",
                error=float(have != want),
                target="equal",
                met=have == want,
                note="no C library here to share memory" if share and "gloo" in transport else "",
            )
    if device.type == "cuda":
        yield _nccl_alone(device)


def _nccl_alone(device: torch.device) -> Measurement:
    """NCCL in a world of one: it starts, adds and gathers, eagerly and in a graph."""
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)  # type: ignore[attr-defined]  # as in communicator.py
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        x = torch.arange(4096, device=device, dtype=torch.float32)
        want = x.clone()
        dist.all_reduce(x)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            dist.all_reduce(x)
        graph.replay()
        torch.cuda.synchronize()
        good = torch.equal(x, want) and torch.equal(parts[0], want)
        del graph  # NCCL waits for the graphs that were captured with the group
    finally:
        dist.destroy_process_group()
    return Measurement(
        "ranks", "NCCL in a world of one, eager and in a graph", error=float(not good), target="equal", met=good
    )


def _run_ranks(path: Path, device: torch.device, share: bool) -> tuple[str, list[list[int]]]:
    """Run two ranks, each a new process of this script. Return (transport, tokens of rank 0)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [["--as-rank", f"{rank},{address},{path},{device.type},{int(share)}"] for rank in range(2)]
    answer = json.loads(run_rank_processes(words, {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}))
    return answer["transport"], answer["tokens"]


def as_rank(words: str) -> None:
    """Run one of two ranks; rank 0 prints transport and tokens. `words`: rank,address,path,device,share_memory."""
    rank, address, path, kind, share = words.split(",")
    device = torch.device(kind)
    communicator = StagedCommunicator.join_staged(int(rank), 2, address, share_memory=bool(int(share)))
    model = load_model(path, communicator=communicator, dtype="float32", device=device)
    communicator.barrier()
    group = _large(model, device, communicator)
    if communicator.rank:
        follow_driver(group.runner, communicator)
    else:
        driver = TpRunner(group.runner, communicator)
        tokens = _tokens(serve(group.engine(runner=driver), prompts_of(5, 90, 512), _GREEDY))
        transport = "shared memory" if communicator.uses_shared_memory else "gloo"
        print(json.dumps({"transport": f"{transport}, over host memory", "tokens": tokens}))
        driver.stop_followers()
    communicator.close()


def _large(model: Model, device: torch.device, communicator: Communicator | None = None) -> Group:
    return Group(model, device, num_blocks=96, max_num_seqs=8, max_model_len=256, communicator=communicator)


def _tiny() -> Shape:
    from transformers import LlamaForCausalLM

    return Shape("tiny", tiny_config(), LlamaForCausalLM)


def _tokens(outputs: Outputs) -> list[list[int]]:
    return [outputs[key][0] for key in sorted(outputs)]
