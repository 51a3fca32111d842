"""The tables of the routing benchmark: ours beside the best other rule of each kind, cell by cell, and how often ours
reaches the targets."""

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import fmean, geometric_mean, median
from typing import Final, NamedTuple

from coatcheck.bench.routing_simulation.cells import CELLS, Cluster
from coatcheck.bench.routing_simulation.comparison import OURS, QUEUED, RULES, TUNABLE, TUNED
from coatcheck.bench.routing_simulation.simulation import SimulationResult
from coatcheck.bench.routing_simulation.workload import Part

Results = Mapping[str, Mapping[str, Mapping[Part, SimulationResult]]]  # cell -> rule -> part of the workload -> figures

# Rules with a weight stand in the last table as tuned only.
OTHERS: Final[Mapping[str, Sequence[str]]] = {
    "rules as published": [rule for rule in RULES if rule != OURS and not rule.endswith(QUEUED)],
    "rules behind our queue": [rule for rule in RULES if rule.endswith(QUEUED) and not rule.endswith(TUNED)],
    "rules behind our queue, tuned on a training part": [
        rule for rule in RULES if rule.endswith(QUEUED) and rule.removesuffix(QUEUED) not in TUNABLE
    ],
}
MAX_RATIO: Final = 1.05  # of TTFT p90 and p99 to the best other rule
MIN_RATIO: Final = 0.98  # of goodput
MAX_IMBALANCE: Final = 1.15  # where groups are alike
_TIMES: Final = ("ttft_p50", "ttft_p90", "ttft_p99")
_ALIKE: Final = {cell.name for cell in CELLS if cell.cluster is Cluster.EQUAL}


class Row(NamedTuple):
    """Ours in one cell beside the best of the others by each figure. Ratios are ours / theirs."""

    cell: str
    ours: SimulationResult
    p90_rule: str
    p90_ratio: float
    p99_rule: str
    p99_ratio: float
    goodput_rule: str
    goodput_ratio: float

    @property
    def reached(self) -> tuple[bool, bool, bool, bool]:
        """Which targets are reached: p90, p99, goodput, and even work where groups are alike."""
        even = self.ours.imbalance <= MAX_IMBALANCE or self.cell not in _ALIKE
        return self.p90_ratio <= MAX_RATIO, self.p99_ratio <= MAX_RATIO, self.goodput_ratio >= MIN_RATIO, even


def compare(results: Results, others: Sequence[str]) -> list[Row]:
    """A row for each cell in which ours and all of `others` have been run on the same part: the means over all such
    parts, geometric ones of times."""
    rows = []
    for cell, runs in results.items():
        parts = set.intersection(*(set(runs.get(rule, {})) for rule in (OURS, *others)))
        if not parts:
            continue
        outcomes = {rule: _mean([runs[rule][part] for part in parts]) for rule in (OURS, *others)}
        ours = outcomes[OURS]
        p90 = min(others, key=lambda rule: outcomes[rule].ttft_p90)
        p99 = min(others, key=lambda rule: outcomes[rule].ttft_p99)
        good = max(others, key=lambda rule: outcomes[rule].goodput)
        most = outcomes[good].goodput
        rows.append(
            Row(
                cell,
                ours,
                p90.removesuffix(QUEUED),
                ours.ttft_p90 / outcomes[p90].ttft_p90,
                p99.removesuffix(QUEUED),
                ours.ttft_p99 / outcomes[p99].ttft_p99,
                good.removesuffix(QUEUED),
                ours.goodput / most if most else 1.0,
            )
        )
    return rows


def _mean(results: Sequence[SimulationResult]) -> SimulationResult:
    means = SimulationResult._make(map(fmean, zip(*results, strict=True)))
    times = {name: geometric_mean([getattr(result, name) for result in results]) for name in _TIMES}
    return means._replace(**times)


def table(rows: Iterable[Row]) -> str:
    """The rows in Markdown."""
    columns = (
        "cell", "ours: TTFT p90", "to the best", "p99", "to the best", "goodput", "to the best", "max/mean work",
        "hits",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        f"| {row.cell} | {row.ours.ttft_p90:.3f} | {row.p90_ratio:.2f} {row.p90_rule} | {row.ours.ttft_p99:.3f} "
        f"| {row.p99_ratio:.2f} {row.p99_rule} | {row.ours.goodput:.3f} | {row.goodput_ratio:.2f} {row.goodput_rule} "
        f"| {row.ours.imbalance:.2f} | {row.ours.hit_ratio:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """How many rows reach each target, and the middle and worst ratios."""
    reached = [row.reached for row in rows]
    p90, p99, goodput, even = (sum(column) for column in zip(*reached, strict=True))
    lines = [
        f"of {len(rows)} cells: TTFT p90 at most {MAX_RATIO} of the best other rule in {p90}, p99 in {p99}, goodput at "
        f"least {MIN_RATIO} of the best in {goodput}, work at most {MAX_IMBALANCE} of the mean, or groups that differ, "
        f"in {even}; all four in {sum(map(all, reached))}",
        *(
            f"{name}: median {median(ratios):.2f}, geometric mean {exp(fmean(map(log, ratios))):.3f}, "
            f"worst {max(ratios):.2f}, below the best in {sum(ratio < 1 for ratio in ratios)}"
            for name, ratios in (("p90", [r.p90_ratio for r in rows]), ("p99", [r.p99_ratio for r in rows]))
        ),
    ]
    return "\n".join(lines)


def worst(rows: Sequence[Row], number: int) -> list[Row]:
    """The rows with the largest p90 or p99 ratio, or the least goodput."""

    def distance(row: Row) -> float:
        return max(row.p90_ratio, row.p99_ratio, 1 / max(row.goodput_ratio, 1e-3))

    return sorted(rows, key=distance, reverse=True)[:number]
