"""The rules that are compared in each cell: ours, and those of others in three ways.

As published they place each request when it comes. Behind our queue they have our queue, its gate, and our knowledge of
prompts in flight. Tuned they have these too, and the weight with the least TTFT p90 on the workload's training part.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from coatcheck.bench.routing_simulation.cells import Cell, Cluster
from coatcheck.bench.routing_simulation.rules import Rule, dynamo, llm_d, ray_serve, rules, sglang
from coatcheck.bench.routing_simulation.service_model import ServiceModel
from coatcheck.bench.routing_simulation.simulation import SimulationResult, run
from coatcheck.bench.routing_simulation.workload import Part, Workload, load_part
from coatcheck.bench.routing_simulation.workloads import tenants


class Tunable(NamedTuple):
    """A rule with a weight, and the weights to choose from: first the published one."""

    make: Callable[[float], Rule]
    weights: tuple[float, ...]


TUNABLE: Final[dict[str, Tunable]] = {
    "dynamo": Tunable(dynamo, (1.0, 0.25, 4.0, 16.0, 64.0)),
    "sglang": Tunable(sglang, (64, 2, 4, 16, 256)),
    "llm-d": Tunable(llm_d, (2.0, 0.25, 0.5, 1.0, 8.0)),
    "ray serve": Tunable(ray_serve, (10, 2, 5, 40, 160)),
}
OURS: Final = "coatcheck"
QUEUED: Final = " + our queue"
TUNED: Final = ", tuned" + QUEUED
RULES: Final = (
    OURS,
    *rules(),
    *(name + QUEUED for name in rules()),
    *(name + TUNED for name in TUNABLE),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One rule on one part of a cell's workload. `weight`: of a tuned rule. `code`: see `fingerprint`."""

    cell: str
    rule: str
    part: Part
    result: SimulationResult
    weight: float | None
    code: str


def measure(cell: Cell, rule: str, part: Part, traces: Path) -> Measured:
    """Run a rule, by its name in RULES, on a part of the cell's workload, with the weight of the training part."""
    name = rule.removesuffix(TUNED).removesuffix(QUEUED)
    weight = _tune(cell, name, traces) if rule.endswith(TUNED) else None
    result = _run(cell, name, load_part(cell.workload, part, traces), rule.endswith(QUEUED), weight)
    return Measured(cell.name, rule, part, result, weight, fingerprint(cell, rule, part, traces))


@cache
def _tune(cell: Cell, name: str, traces: Path) -> float:
    training = load_part(cell.workload, Part.TRAINING, traces)
    return min(TUNABLE[name].weights, key=lambda w: _run(cell, name, training, True, w).ttft_p90)


def _run(cell: Cell, name: str, workload: Workload, queued: bool, weight: float | None) -> SimulationResult:
    make_rule = None if name == OURS else rules()[name] if weight is None else partial(TUNABLE[name].make, weight)
    return run(cell, make_rule, workload, queued=queued)


def fingerprint(cell: Cell, rule: str, part: Part, traces: Path) -> str:
    """Changes if the workload changes, or the code, so that the rule chooses otherwise. Figures with another
    fingerprint are of earlier code."""
    parts = (Part.TRAINING, part) if rule.endswith(TUNED) else (part,)
    digests = [_digest(cell.workload, used, traces) for used in parts]
    return blake2b(" ".join([*digests, _behaviour(rule)]).encode(), digest_size=4).hexdigest()


@cache
def _digest(workload: str, part: Part, traces: Path) -> str:
    return load_part(workload, part, traces).digest


_PROBES: Final = (
    Cell("", 60, 0.95, host_blocks=30, routers=2),
    Cell("", 120, 0.85, cluster=Cluster.MIXED_SPEEDS),
    Cell("", 200, 0.7, cluster=Cluster.MIXED_SIZES),
    Cell("", 80, 0.9, cluster=Cluster.CHANGING),
)


@cache
def _behaviour(rule: str) -> str:
    """All figures of short runs, to the last bit. Unlike the source they do not change when code is only rewritten."""
    name = rule.removesuffix(TUNED).removesuffix(QUEUED)
    weights: tuple[float | None, ...] = TUNABLE[name].weights if rule.endswith(TUNED) else (None,)
    figures = [
        _run(cell, name, _probe(), rule.endswith(QUEUED), weight)._asdict() for cell in _PROBES for weight in weights
    ]
    return repr((asdict(ServiceModel()), weights, figures))


@cache
def _probe() -> Workload:
    return Workload(tenants(0, 20, 300))
