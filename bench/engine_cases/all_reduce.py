"""Time of one all-reduce between the ranks of a group on one CPU host: shared memory beside gloo, in one run.

    python bench/engine_cases/all_reduce.py [--ranks 2] [--json bench/results/all_reduce.json]

Rounds alternate between the two, so that a busy moment hits both; a figure is the median call of the best round, on
the rank that waited longest. The other rows are broadcasts of a decode step's plan: rank 0's integers to all ranks.
"""

import multiprocessing
import socket
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.workers.distributed.communicator import Communicator

SHAPES = ((1, 768), (16, 768), (512, 768), (512, 4096))
TARGET = (16, 768)
AT_LEAST = 5.0


def measure(rank: int, ranks: int, address: str, rounds: int, calls: int, answer: Any) -> None:
    """Run one rank. Send its seconds by operation and transport through `answer`."""
    torch.set_num_threads(1)
    communicator = Communicator.join(rank, ranks, address, device=torch.device("cpu"))
    assert communicator.uses_shared_memory, "these ranks share a host"

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    figures: dict[str, dict[str, list[float]]] = {}
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=torch.bfloat16)
        for _ in range(rounds):
            for name, transport in (("gloo", dist.all_reduce), ("shared memory", communicator.all_reduce)):
                seconds = median(partial(transport, x))
                figures.setdefault(f"sum of {list(shape)} bf16", {}).setdefault(name, []).append(seconds)
    plan = array("i", range(200))
    shared = communicator._shared
    for _ in range(rounds):
        for name, memory in (("gloo", None), ("shared memory", shared)):
            communicator._shared = memory

            def broadcast() -> None:
                communicator.broadcast_ints(plan if rank == 0 else None)

            def broadcast_and_reduce() -> None:
                broadcast()
                communicator.all_reduce(torch.zeros(1))

            for what, work in (("a plan of 200 ints", broadcast), ("the same, and a sum of [1]", broadcast_and_reduce)):
                figures.setdefault(what, {}).setdefault(name, []).append(median(work))
    communicator._shared = shared
    answer.send({what: {name: min(times) for name, times in both.items()} for what, both in figures.items()})
    communicator.close()


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, a thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds.")] = 5,
    calls: Annotated[int, typer.Option(min=5, help="Calls a round.")] = 300,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure sums between ranks through shared memory and through gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=measure, args=(rank, ranks, address, rounds, calls, pipes[rank][1]))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    answers = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    table = Table(title=f"{ranks} ranks of one host, microseconds a call")
    for column in ("what", "gloo", "shared memory", "times as fast"):
        table.add_column(column)
    rows = {}
    for what in answers[0]:
        gloo, shared = (max(answer[what][name] for answer in answers) * 1e6 for name in ("gloo", "shared memory"))
        target = what == f"sum of {list(TARGET)} bf16"
        rows[what] = {"gloo_us": gloo, "shared_memory_us": shared, "ratio": gloo / shared}
        table.add_row(what, f"{gloo:.0f}", f"{shared:.1f}", f"{gloo / shared:.1f}" + (f" (≥ {AT_LEAST})" * target))
    Console().print(table)
    write_results(json_path, describe_machine() | {"ranks": ranks, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
