"""How fast the engine is, compared with transformers' own model and cache: same weights, same threads, one run.

    python bench/engine.py [--json bench/results/engine.json]

Rounds alternate between the two, so that a busy moment of the machine slows both. A figure is the median of its best
round. The same run measures the machine's limits (roofline): memory bandwidth for a decode step, which reads every
weight and the batch's KV once, and the matrix rate for a prefill.
"""

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from coatcheck.bench.engine_cases.contestants import Coatcheck, Contestant, Transformers
from coatcheck.bench.setup.checkpoint import EMBEDDING_BYTES, VOCABULARY, make_checkpoint
from coatcheck.bench.setup.results_file import describe_machine, write_results
from coatcheck.bench.setup.roof import matrix_throughput, read_bandwidth

CONTEXT = 256


@dataclass(frozen=True, slots=True)
class EngineCase:
    """A decode step of `batch` sequences, or a prefill of `tokens` if `batch` is 0. `target`: the wanted speed-up."""

    batch: int
    tokens: int
    target: float

    @property
    def title(self) -> str:
        return f"decode, batch {self.batch}, context {self.tokens}" if self.batch else f"prefill of {self.tokens}"


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One row's figures, in milliseconds."""

    what: str
    transformers_ms: float
    coatcheck_ms: float
    ratio: float
    target: float
    roof_ms: float
    share_of_roof: float


CASES = (
    EngineCase(1, CONTEXT, 2.5),
    EngineCase(16, CONTEXT, 4.0),
    EngineCase(32, CONTEXT, 3.5),
    EngineCase(0, 512, 1.4),
)


def main(
    threads: Annotated[int, typer.Option(help="Intra-op threads of both.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds per row.")] = 5,
    steps: Annotated[int, typer.Option(min=3, help="Decode steps per round.")] = 24,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the checkpoint is, or is to be made and kept.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure the engine beside transformers."""
    torch.set_num_threads(threads)
    with TemporaryDirectory() as scratch:
        directory = make_checkpoint(checkpoint or Path(scratch) / "llama-82m")
        ours, theirs = Coatcheck(directory), Transformers(directory)
        roofs = [(read_bandwidth(), matrix_throughput())]
        timed = []
        for case in CASES:
            timed.append((case, *measure(case, ours, theirs, rounds, steps)))
            roofs.append((read_bandwidth(), matrix_throughput()))
        bandwidth, throughput = map(max, zip(*roofs, strict=True))
        rows = [judge(*row, ours, bandwidth, throughput) for row in timed]
    Console().print(as_table(rows, bandwidth, throughput))
    facts: dict[str, Any] = dict(describe_machine(), threads=threads, rounds=rounds, steps=steps)
    facts |= dict(read_bytes_per_second=bandwidth, flops_per_second=throughput)
    write_results(json_path, facts | {"rows": [asdict(row) for row in rows]})


def measure(case: EngineCase, ours: Coatcheck, theirs: Transformers, rounds: int, steps: int) -> tuple[float, float]:
    """(seconds of transformers, seconds of Coatcheck), each in its best round. Rounds alternate."""
    # Half of the decode steps come before the context is reached, half after.
    length = case.tokens - steps // 2 if case.batch else case.tokens
    prompts = np.random.default_rng(case.batch).integers(0, VOCABULARY, (rounds + 1, max(1, case.batch), length))

    def seconds(contestant: Contestant, index: int) -> float:
        if case.batch:
            return statistics.median(contestant.decode(prompts[index].tolist(), steps))
        return contestant.prefill(prompts[index][0].tolist())

    pairs = [(seconds(theirs, index), seconds(ours, index)) for index in range(rounds + 1)]
    # The first round warms both and is not counted.
    their_best, our_best = (min(times) for times in zip(*pairs[1:], strict=True))
    return their_best, our_best


def judge(
    case: EngineCase, their_best: float, our_best: float, ours: Coatcheck, bandwidth: float, throughput: float
) -> EngineFigures:
    """The figures of a case, with the machine's limits."""
    if case.batch:
        roof = (ours.weight_bytes + case.batch * case.tokens * ours.kv_bytes_per_token) / bandwidth
    else:
        # Two operations a weight (of two bytes) and token; attention and the head, of one position, are left out.
        roof = case.tokens * (ours.weight_bytes - EMBEDDING_BYTES) / throughput
    return EngineFigures(
        what=case.title,
        transformers_ms=their_best * 1e3,
        coatcheck_ms=our_best * 1e3,
        ratio=their_best / our_best,
        target=case.target,
        roof_ms=roof * 1e3,
        share_of_roof=roof / our_best,
    )


def as_table(rows: list[EngineFigures], bandwidth: float, throughput: float) -> Table:
    roofs = f"roofs: memory {bandwidth / 1e9:.0f} GB/s, matrices {throughput / 1e9:.0f} GFLOP/s"
    table = Table(title="82M llama, bfloat16, milliseconds", caption=roofs)
    table.add_column("what")
    for name in ("transformers", "coatcheck", "ratio", "to reach", "roof", "share of roof"):
        table.add_column(name, justify="right")
    for row in rows:
        style = "green" if row.ratio >= row.target else "red"
        table.add_row(
            row.what, f"{row.transformers_ms:.2f}", f"{row.coatcheck_ms:.2f}", f"[{style}]{row.ratio:.2f}×[/]",
            f"≥ {row.target}×", f"{row.roof_ms:.2f}", f"{row.share_of_roof:.0%}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
