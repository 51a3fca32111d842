"""Cost of the host tier when no prefix is reused: two engines over one model, measured in turn.

    python bench/kv_cases/host_tier_steps.py [--pairs 24] [--json bench/results/host_tier.json]

One process, no server, so that other work on the machine disturbs both alike: in every round both engines run the same
new prompts, in alternating order. The engine with the tier demotes every block that it evicts.
"""

import json
import random
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from coatcheck.bench.setup.checkpoint import VOCABULARY, make_checkpoint
from coatcheck.bench.setup.cpu_engine import load_cpu_model, make_cpu_engine
from coatcheck.bench.setup.results_file import update_results
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.engine.engine import Engine

_NUM_BLOCKS = 200  # of 192 KiB each
_CLIENTS, _PROMPT, _REPLY = 4, 512, 32


def main(
    pairs: Annotated[int, typer.Option(help="Rounds, each of both engines.")] = 24,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to this file.")] = None,
) -> None:
    """Measure the pairs."""
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint((checkpoint or Path(scratch) / "llama-82m").resolve())
        model = load_cpu_model(directory)
    engines = {
        name: make_cpu_engine(model, num_blocks=_NUM_BLOCKS, max_num_seqs=_CLIENTS, host_blocks=host_blocks)
        for name, host_blocks in (("off", 0), ("on", 1000))
    }
    for seed in range(2):  # the pools are full from here on
        for engine in engines.values():
            serve(engine, -1 - seed)
    taken: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    demoted = engines["on"].stats().demotions
    for seed in range(pairs):
        for name in sorted(engines, reverse=seed % 2 == 1):
            taken[name].append(serve(engines[name], seed))
    pairwise = list(zip(taken["off"], taken["on"], strict=True))
    figures = {
        "pairs": pairs,
        "tokens_a_round": _CLIENTS * (_PROMPT + _REPLY),
        "seconds_off": statistics.median(wall for wall, _ in taken["off"]),
        "throughput_on_over_off": statistics.median(off[0] / on[0] for off, on in pairwise),
        "processor_on_over_off": statistics.median(on[1] / off[1] for off, on in pairwise),
        "demoted_blocks_a_round": (engines["on"].stats().demotions - demoted) / pairs,
        "demote_seconds_a_block": engines["on"].stats().demote_seconds,
    }
    print(json.dumps(figures, indent=1))
    update_results(json_path, steps=figures)


def serve(engine: Engine, seed: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of one round."""
    rng = random.Random(seed)
    began, busy = time.perf_counter(), time.process_time()
    for client in range(_CLIENTS):
        prompt = tuple(rng.randrange(2, VOCABULARY) for _ in range(_PROMPT))
        sampling = SamplingParams(max_tokens=_REPLY, temperature=0.0, ignore_eos=True, seed=0)
        engine.submit_request(EngineRequest(f"{seed} {client}", prompt, sampling))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began, time.process_time() - busy


if __name__ == "__main__":
    typer.run(main)
