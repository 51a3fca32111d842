"""Compares our choose_group() and queue with published routing rules, in a simulation.

The load is three public traces and eleven synthetic workloads (workloads.py). The groups are alike, differ in speed or
size, or drain and join, behind 1 to 16 routers (cells.py). Each published rule runs in each cell as published, behind
our queue, and behind our queue with its weight tuned on a training part of the workload (comparison.py). A synthetic
workload is measured with three seeds; its figures are means. The published rules always see the true state of every
group. Our router sees what it would see in production: reports every 100 ms, the blocks that groups hold, and the
requests that it has sent.

    python bench/routing.py [--traces DIR] [--json out.jsonl] [--resume] [--only conversation/3000/0.95] [--tables]

A run writes a line for each rule in each cell, as soon as it is measured. `--resume` keeps the lines of a file except
those of other code or workloads. So after a change to our routing only our own lines are measured again. `--tables`
prints the tables of an existing file and measures nothing. public_traces.py says where to get the traces.
"""

import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coatcheck.bench.routing_simulation.cells import CELLS, Cell
from coatcheck.bench.routing_simulation.comparison import RULES, TUNED, Measured, fingerprint, measure
from coatcheck.bench.routing_simulation.comparison_tables import OTHERS, compare, summary, table, worst
from coatcheck.bench.routing_simulation.simulation import SimulationResult
from coatcheck.bench.routing_simulation.workload import FILES, Part, measured_parts
from coatcheck.bench.setup.public_traces import FOLDER, Traces, check_traces
from coatcheck.cluster.command import fail
from coatcheck.proto.errors import InvalidConfig

_WORST = 15  # cells that are listed after each table


class Task(NamedTuple):
    """A rule to run in a cell."""

    cell: Cell
    rule: str
    part: Part
    traces: Path


def main(
    traces: Traces = FOLDER,
    only: Annotated[str, typer.Option(help="Only cells whose name begins with this.")] = "",
    processes: Annotated[int, typer.Option(help="Processes at once.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to keep the figures.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the figures that the file has.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Run nothing.")] = False,
) -> None:
    """Run the missing tasks. Then print, for each kind of rule, a line per cell and how many cells reach each
    target."""
    try:
        cells = _cells(only)
        check_traces(traces, dict.fromkeys(FILES[cell.workload] for cell in cells if cell.workload in FILES))
        known = _read(json_path, keep=resume or tables)
    except InvalidConfig as error:
        sys.exit(fail(str(error), 2))
    if not tables:
        wanted = [
            Task(cell, rule, part, traces)
            for cell in _shuffled(cells)
            for rule in RULES
            for part in measured_parts(cell.workload)
        ]
        wanted.sort(key=lambda task: (task.part.value, task.rule.endswith(TUNED)))  # tuned rules take longest
        _run(wanted, known, json_path, processes)
    results: dict[str, dict[str, dict[Part, SimulationResult]]] = {}
    for measured in known.values():
        if measured.cell in {cell.name for cell in cells}:
            results.setdefault(measured.cell, {}).setdefault(measured.rule, {})[measured.part] = measured.result
    for title, others in OTHERS.items():
        if rows := compare(results, others):
            print(f"\n## {title}\n\n{table(rows)}\n\n{summary(rows)}")
            print(f"\nthe {_WORST} worst:\n\n{table(worst(rows, _WORST))}")


def _cells(only: str) -> list[Cell]:
    """The cells whose name begins with `only`. Raises InvalidConfig if there is none."""
    cells = [cell for cell in CELLS if cell.name.startswith(only)]
    if not cells:
        names = f"{CELLS[0].name} to {CELLS[-1].name}"
        raise InvalidConfig(f"no cell's name begins with {only!r}; they are workload/blocks/load, {names}")
    return cells


def _shuffled(cells: list[Cell]) -> list[Cell]:
    """The cells in an order whose beginning has cells of all kinds, for a run that is stopped early."""
    return random.Random(0).sample(cells, len(cells))


Known = dict[tuple[str, str, Part], Measured]  # by cell, rule and part


def _read(path: Path | None, keep: bool) -> Known:
    """The figures of an earlier run. A last line without a line break is from an interrupted run, and is dropped.

    Raises InvalidConfig if the file has figures that shall not be kept, or if a line is damaged.
    """
    if path is None or not path.exists():
        return {}
    if not keep:
        raise InvalidConfig(f"{path} is there already; continue it with --resume, or name another file")
    known: Known = {}
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            result = SimulationResult(**row["figures"])
            measured = Measured(row["cell"], row["rule"], Part(row["part"]), result, row["weight"], row["code"])
            known[_key(measured)] = measured
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidConfig(f"line {number} of {path} is no figure of this benchmark: {error!r}") from None
    return known


def _key(measured: Measured) -> tuple[str, str, Part]:
    return measured.cell, measured.rule, measured.part


def _line(measured: Measured) -> str:
    figures = {name: float(f"{value:.6g}") for name, value in measured.result._asdict().items()}
    row = {"cell": measured.cell, "rule": measured.rule, "part": measured.part.value, "weight": measured.weight}
    row["code"] = measured.code
    return json.dumps({**row, "figures": figures}) + "\n"


def _run(wanted: list[Task], known: Known, path: Path | None, processes: int) -> None:
    """Run the tasks whose figures are not in `known` or come from other code. Write each figure at once."""
    missing = [
        task
        for task in wanted
        if (old := known.get((task.cell.name, task.rule, task.part))) is None or old.code != fingerprint(*task)
    ]
    for task in missing:
        known.pop((task.cell.name, task.rule, task.part), None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(_line, known.values())))
    for measured in _measure(missing, processes):
        known[_key(measured)] = measured
        if path is not None:
            with path.open("a") as file:
                file.write(_line(measured))


def _measure(tasks: list[Task], processes: int) -> Iterator[Measured]:
    """Run the tasks, with a progress bar that shows the time left."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with (
        multiprocessing.get_context("spawn").Pool(processes) as pool,
        Progress(*columns, console=Console(stderr=True), speed_estimate_period=300) as progress,
    ):
        bar = progress.add_task("", total=len(tasks))
        for measured in pool.imap(_measure_task, tasks):
            progress.update(bar, advance=1, description=measured.cell)
            yield measured


def _measure_task(task: Task) -> Measured:
    return measure(*task)


if __name__ == "__main__":
    typer.run(main)
