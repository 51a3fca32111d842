"""How long existing streams stall while a router attaches to a group with many cached blocks.

Two groups run in their own processes: the real engine loop, caches and Worker service, with a model that only sleeps.
The pool of `full` is full of cached blocks, that of `small` has none. Each group runs one long request for a stand-in
router of plain gRPC, which records when each batch of tokens arrives. Then a real router (GroupRegistry, PrefixIndex)
attaches to `full`.

- group: the longest gap between two batches of `full` at the router that was attached before
- router: the longest gap between two batches of `small`, read in the process of the router that attaches

Both are compared with the longest gap of an equally long time in which no router attaches. The script also measures the
seconds until the router has every block, and the longest gap of `small` when the router drops `full`.

    python bench/scale_snapshot.py [--blocks 100000] [--blocks 1000000] [--json bench/results/scale_snapshot.json]
"""

import asyncio
import gc
import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer

from coatcheck.bench.setup.results_file import update_results
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub
from coatcheck.router.config import GROUP_MESSAGE_BYTES, RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.workers.core.model_spec import LayerSpec, ModelSpec
from coatcheck.workers.core.runner_protocol import StepResult
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService

_BLOCK_SIZE = 16
_CHAIN_BLOCKS = 512  # of one cached prompt
_STEP_SECONDS = 0.01
_SPEC = ModelSpec(
    name="m",
    architecture="m",
    vocab_size=1000,
    max_model_len=1 << 20,
    dtype="float32",
    fingerprint="m",
    eos_token_ids=(0,),
    layers=(LayerSpec(1, 1, 16),),
    tp=1,
    num_weights=1 << 19,
    weight_bytes=1 << 20,
)


class _SleepingModel:
    """A Runner whose steps sleep. Every token is 7."""

    def launch(self, plan: StepPlan) -> "_SleptStep":
        time.sleep(_STEP_SECONDS)
        return _SleptStep(StepResult([7 if row.needs_sample else -1 for row in plan.scheduled]))


@dataclass
class _SleptStep:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def _run_group(pipe: Connection, name: str, blocks: int) -> None:
    """Serve a group whose pool holds `blocks` cached blocks, until the pipe says to stop."""
    num_blocks = blocks + 4096
    engine = Engine(_SPEC, _SleepingModel(), num_blocks=num_blocks, block_size=_BLOCK_SIZE)
    pool = engine.scheduler.pool
    for start in range(0, blocks, _CHAIN_BLOCKS):
        held, parent = pool.allocate_blocks(min(_CHAIN_BLOCKS, blocks - start)), b""
        for depth, block in enumerate(held):
            block_hash = (start + depth).to_bytes(16, "big")
            pool.register_block(block, block_hash, parent, depth)
            parent = block_hash
        pool.release_blocks(held)
    pool.drain_events()
    gc.collect()
    gc.freeze()  # a collection of the blocks made here would be measured as a gap
    registration = wire.Registration(
        group=name,
        epoch=name,
        num_blocks=num_blocks,
        max_num_seqs=8,
        contract=CONTRACT,
        version=VERSION,
        model=public.GetModelResponse(name="m", block_size=_BLOCK_SIZE),
    )
    service = WorkerService(GroupReport(registration, [public.RankStatus(rank=0, healthy=True)]))
    loop = EngineLoop(engine, on_step=service.publish, on_death=lambda error: None)
    address = service.start(loop, "127.0.0.1:0")
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    pipe.send(address)
    pipe.recv()
    loop.stop()
    thread.join()
    service.stop()


class _TokenStream:
    """A router's stream with one request that runs until the end. `gap`: the longest between two batches since
    `restart`."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", GROUP_MESSAGE_BYTES)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stream = WorkerStub(self._channel).Attach()  # type: ignore[no-untyped-call]  # made by protoc
        self._began = asyncio.Event()
        self.gap = self._last = 0.0
        self._task = asyncio.create_task(self._read())

    async def start(self) -> None:
        """Returns when tokens come."""
        await self._began.wait()

    def restart(self) -> None:
        self.gap, self._last = 0.0, time.monotonic()

    async def close(self) -> None:
        self._task.cancel()
        self._stream.cancel()
        await self._channel.close()  # type: ignore[call-arg]  # grace is optional

    async def _read(self) -> None:
        await self._stream.write(wire.ToGroup(hello=wire.Hello(router="before", contract=CONTRACT, version=VERSION)))
        sampling = public.SamplingParams(max_tokens=60_000, seed=1, ignore_eos=True)
        await self._stream.write(wire.ToGroup(submit=wire.Submit(id=1, prompt_token_ids=[1], sampling=sampling)))
        while isinstance(message := await self._stream.read(), wire.FromGroup):
            if message.HasField("batch"):
                now = time.monotonic()
                self.gap, self._last = max(self.gap, now - (self._last or now)), now
                self._began.set()


def _watch_group(pipe: Connection, address: str) -> None:
    """Run a stream to the group, in a separate process. Send the longest gap whenever the pipe asks for it."""

    async def watch() -> None:
        stream = _TokenStream(address)
        await stream.start()
        stream.restart()
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) == "gap":
            pipe.send(stream.gap)
            stream.restart()
        await stream.close()

    asyncio.run(watch())


async def _measure(blocks: int, rounds: int) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    started = []

    async def start(target: object, *args: object) -> tuple[Connection, str]:
        pipe, end = processes.Pipe()
        process = processes.Process(target=target, args=(end, *args), daemon=True)  # type: ignore[arg-type]
        process.start()
        started.append((pipe, process))
        return pipe, await asyncio.to_thread(pipe.recv)

    _, full = await start(_run_group, "full", blocks)
    _, small = await start(_run_group, "small", 0)
    watcher, _ = await start(_watch_group, full)
    inside = _TokenStream(small)
    await inside.start()

    async def gaps() -> tuple[float, float]:
        watcher.send("gap")
        group = await asyncio.to_thread(watcher.recv)
        router = inside.gap
        inside.restart()
        return group, router

    groups = GroupRegistry(RouterConfig(model="m"))
    measured: dict[str, list[float]] = {}
    for _ in range(rounds):
        await gaps()
        began = time.monotonic()
        await groups.set_endpoints([GroupEndpoint("full", full)])
        while groups.index.entries < blocks:  # noqa: ASYNC110  # the index has no event
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        attach = await gaps()
        await asyncio.sleep(seconds)
        quiet = await gaps()
        await groups.set_endpoints([])
        await asyncio.sleep(0.1)
        figures = {
            "group_gap_ms": attach[0] * 1e3,
            "group_quiet_gap_ms": quiet[0] * 1e3,
            "router_gap_ms": attach[1] * 1e3,
            "router_quiet_gap_ms": quiet[1] * 1e3,
            "router_gap_on_leaving_ms": (await gaps())[1] * 1e3,
            "seconds": seconds,
        }
        for name, figure in figures.items():
            measured.setdefault(name, []).append(figure)
    await inside.close()
    for pipe, process in reversed(started):
        pipe.send("stop")
        process.join(10)
    return {"blocks": blocks, **{name: statistics.median(figures) for name, figures in measured.items()}}


def main(
    blocks: Annotated[list[int], typer.Option(help="Cached blocks; may be repeated.")] = [100_000, 1_000_000],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Times that the router attaches; the median is printed.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure each number of blocks."""
    rows = []
    for count in blocks:
        row = asyncio.run(_measure(count, rounds))
        rows.append(row)
        print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()), flush=True)
    update_results(json_path, attach={"rows": rows})


if __name__ == "__main__":
    typer.run(main)
