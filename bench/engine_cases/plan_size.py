"""Size of a step plan whose new rows share a JSON schema, and the time to send it to another rank on the same host.

    python bench/engine_cases/plan_size.py [--rows 32] [--letters 65536]

The schema has been announced and compiled, as always before a row uses it. Rounds alternate between gloo and shared
memory. In a send, as in a group, rank 0 encodes and broadcasts, and rank 1 receives and decodes; a small all-reduce
after it makes rank 0 wait until rank 1 has the plan. A figure is the median send of the best round, on rank 0.
"""

import json
import multiprocessing
import socket
import statistics
import time
from typing import Annotated, Any

import torch
import typer

from coatcheck.bench.setup.results_file import describe_machine
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence, StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.structured.grammar_registry import MAX_COMPILING, GrammarRegistry, compile_queue_of

_PROMPT = tuple(range(100, 132))
_ROUNDS, _CALLS = 5, 40


def plans(rows: int, letters: int) -> dict[str, StepPlan]:
    """By title: the plan that announces a grammar, and `rows` new rows without and with that grammar."""
    grammar = Grammar("json_schema", json.dumps({"type": "string", "description": "x" * letters}))
    registry, announces = GrammarRegistry(), StepPlan()
    sampling = SamplingParams(seed=7, structured=grammar)
    request = EngineRequest("r", _PROMPT, sampling)
    registry.add_request([Sequence(request, 0, [*_PROMPT], 99, (0, 0), frozenset())])
    registry.fill_plan(announces)
    registry.record_compiled(tuple(int(queue == compile_queue_of(grammar)) for queue in range(len(MAX_COMPILING))))
    made = {"announces the schema": announces}
    for name, params in ((f"{rows} rows, free", SamplingParams(seed=7)), (f"{rows} rows, constrained", sampling)):
        plan = StepPlan()
        for slot in range(rows):
            plan.new_sequences.append(NewSequence(slot, 0, len(_PROMPT), [*_PROMPT], params, ()))
            plan.scheduled.append(ScheduledSequence(slot, 0, len(_PROMPT), True))
        registry.fill_plan(plan)
        made[name] = plan
    return made


def measure(rank: int, address: str, rows: int, letters: int, answer: Any) -> None:
    """Run one rank. Send its seconds by plan and transport through `answer`."""
    torch.set_num_threads(1)
    communicator = Communicator.join(rank, 2, address, device=torch.device("cpu"))
    assert communicator.uses_shared_memory, "these ranks share a host"
    shared = communicator._shared
    figures: dict[str, dict[str, float]] = {}
    for name, plan in plans(rows, letters).items():
        best = {"gloo": float("inf"), "shared memory": float("inf")}
        for _ in range(_ROUNDS):
            for transport, memory in (("gloo", None), ("shared memory", shared)):
                communicator._shared = memory
                times = []
                for _ in range(_CALLS):
                    began = time.perf_counter()
                    if rank == 0:
                        communicator.broadcast_ints(plan.encode())
                    else:
                        StepPlan.decode(communicator.broadcast_ints(None))
                    communicator.all_reduce(torch.zeros(1))
                    times.append(time.perf_counter() - began)
                best[transport] = min(best[transport], statistics.median(times))
        figures[name] = best
    communicator._shared = shared
    answer.send(figures)
    communicator.close()


def main(
    rows: Annotated[int, typer.Option(min=1, help="New rows of one plan.")] = 32,
    letters: Annotated[int, typer.Option(min=1, max=250_000, help="Characters of the schema.")] = 65_536,
) -> None:
    """Measure plans of rows that share a schema."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=measure, args=(rank, address, rows, letters, pipes[rank][1])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    figures, _ = (receiver.recv() for receiver, _ in pipes)
    for process in processes:
        process.join()
    print(describe_machine())
    for name, plan in plans(rows, letters).items():
        sent = ", ".join(f"{seconds * 1e3:.2f} ms over {transport}" for transport, seconds in figures[name].items())
        print(f"{name:27} {len(plan.encode()) * 4:9,} bytes; sent in {sent}")


if __name__ == "__main__":
    typer.run(main)
