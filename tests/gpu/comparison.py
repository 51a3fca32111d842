"""Compares what a GPU answers with what the CPU answers.

Random models have near ties, which rounding decides. So two answers are compared up to the first token in which they
differ. A greedy token may differ if the two choices have about the same log-probability. A drawn token may differ and
no log-probability show why, so a few drawn answers may differ. Log-probabilities of a prompt's tokens need no such
allowance.
"""

from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from tests.gpu.outcome import Refused, Skipped
from tests.gpu.served import Answer, Served, serve_tiny

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Bounds:
    """`most`: of the difference of two log-probabilities, for log-probabilities up to 10; above, in proportion.
    `mean`: of the mean difference over prompts. `parted`: how many drawn answers may differ."""

    most: float
    mean: float
    parted: int


EXACT = Bounds(most=2e-3, mean=5e-4, parted=1)
# A key or value near the middle between two codes may get another code.
QUANTISED_POOL = Bounds(most=0.5, mean=0.03, parted=3)


def compare_paths(
    path: Path, device: torch.device, bounds: Bounds, *, brief: bool = False, **settings: Any
) -> str:  # fmt: skip
    """Serve the checkpoint on `device` and on the CPU, and compare. Returns what was measured."""
    want = serve_on_cpu(path, brief=brief, **settings)
    have = serve_on(path, device, brief=brief, **settings)
    return compare(have, want, bounds)


def serve_on_cpu(path: Path, **settings: Any) -> Served:
    """Raises Skipped for what the CPU's path refuses."""
    try:
        return serve_tiny(path, CPU, **settings)
    except (InvalidModel, InvalidConfig) as error:
        raise Skipped(f"the CPU's path refuses it: {error}") from error


def serve_on(path: Path, device: torch.device, **settings: Any) -> Served:
    """Raises Refused for what the GPU's path refuses."""
    try:
        return serve_tiny(path, device, **settings)
    except (InvalidModel, InvalidConfig) as error:
        raise Refused(str(error)) from error


def compare(have: Served, want: Served, bounds: Bounds) -> str:
    """What was measured. Raises AssertionError beyond the bounds."""
    error, parted = 0.0, 0
    for kind, ours, theirs in (("greedy", have.greedy, want.greedy), ("drawn", have.drawn, want.drawn)):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert len(one[0]) == len(other[0]), f"{kind} answer {index} has {len(one[0])} of {len(other[0])} tokens"
            equal = count_equal(one, other)
            until = equal + (kind == "greedy")  # also the two log-probabilities of the first greedy tokens that differ
            for place, pair in enumerate(zip(one[1][:until], other[1][:until], strict=True)):
                error = max(error, off := difference(*pair))
                assert off < bounds.most, f"{kind} answer {index}, token {place}: log-probabilities {pair}"
            parted += equal < len(other[0])
    drawn = sum(count_equal(*pair) < len(pair[1][0]) for pair in zip(have.drawn, want.drawn, strict=True))
    assert drawn <= bounds.parted, f"{drawn} of {len(want.drawn)} drawn answers differ"
    mean, most = mean_difference(have.scores, want.scores), max(map(difference, have.scores, want.scores))
    assert mean < bounds.mean and most < bounds.most, f"prompts' log-probabilities differ by {mean:.1e}, at most {most}"
    counts = ", ".join(f"{name} {count}" for name, count in have.counts.items())
    return f"log-probabilities within {max(error, most):.1e}, {parted} answers part; {counts}"


def compare_rounded(path: Path, device: torch.device, *, brief: bool = False, **settings: Any) -> str:
    """In bfloat16 the GPU is about as far from float32 as the CPU is. Returns what was measured."""
    exact = serve_on_cpu(path, brief=brief, **settings)
    near = serve_on_cpu(path, brief=brief, dtype="bfloat16", **settings)
    have = serve_on(path, device, brief=brief, dtype="bfloat16", **settings)
    ours, theirs = (mean_difference(one.scores, exact.scores) for one in (have, near))
    assert ours <= 2 * theirs + 0.02, f"the mean difference from float32 is {ours:.3f}, that of the CPU {theirs:.3f}"
    return f"mean difference from float32 {ours:.3f}, that of the CPU {theirs:.3f}"


def count_equal(one: Answer, other: Answer) -> int:
    """How many tokens are equal before the first that differs."""
    return next(
        (place for place, pair in enumerate(zip(one[0], other[0], strict=False)) if pair[0] != pair[1]), len(other[0])
    )


def difference(one: float, other: float) -> float:
    """NaN differs from all numbers."""
    off = abs(one - other) / max(1.0, abs(other) / 10)
    return off if off == off else float("inf")


def mean_difference(have: list[float], want: list[float]) -> float:
    assert len(have) == len(want) > 20, (len(have), len(want))
    return sum(starmap(difference, zip(have, want, strict=True))) / len(want)
