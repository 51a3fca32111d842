"""How much of a property or of a product of parameters `make test` tries. `make test-all`, which sets TEST_ALL, tries
more examples and every combination."""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

_FACTOR = 4 if "TEST_ALL" in os.environ else 1


def examples(count: int) -> int:
    """`count` in `make test`, four times as many in `make test-all`."""
    return count * _FACTOR


def pairwise(*axes: tuple[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """A parametrisation by every combination of the axes' values, of which `make test` runs a sample that has each pair
    of values of two axes. The other combinations are marked full.

    axes: (names, values) as for `pytest.mark.parametrize`, also with several names and tuples of values; at least two
    axes. Most faults depend on at most two parameters (Kuhn, Wallace and Gallo, IEEE TSE 30(6), 2004).
    """
    combinations = list(itertools.product(*(range(len(values)) for _, values in axes)))
    pairs = [set(itertools.combinations(enumerate(places), 2)) for places in combinations]
    missing, chosen = set().union(*pairs), set[int]()
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    cases = []
    for index, places in enumerate(combinations):
        values: list[Any] = []
        for (names, choices), place in zip(axes, places, strict=True):
            values += choices[place] if "," in names else [choices[place]]
        cases.append(pytest.param(*values, marks=() if index in chosen else pytest.mark.full))
    return pytest.mark.parametrize(", ".join(names for names, _ in axes), cases)
