"""The samples of `make test`: which combinations of parameters run there."""

import itertools

from tests.examples import pairwise


def test_a_sample_has_every_pair_and_the_rest_runs_in_full() -> None:
    """Each pair of values is in the sample, which is small, and no combination is lost."""
    axes = (("a", [1, 2, 3]), ("b, c", [(4, 5), (6, 7)]), ("d", [8, 9]), ("e", [None, "x", "y"]))
    mark = pairwise(*axes).mark
    assert mark.args[0] == "a, b, c, d, e"
    every = [(case.values, bool(case.marks)) for case in mark.args[1]]
    product = itertools.product([1, 2, 3], [(4, 5), (6, 7)], [8, 9], [None, "x", "y"])
    assert [values for values, _ in every] == [(a, *bc, d, e) for a, bc, d, e in product]
    sample = [values for values, is_full in every if not is_full]
    assert len(sample) <= 12 < len(every) == 36
    for one, other in itertools.combinations((0, 1, 3, 4), 2):
        assert {(values[one], values[other]) for values in sample} == {(v[one], v[other]) for v, _ in every}
