"""ServingGroups: which groups can run a request, and that equal answers are one object."""

import random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatcheck.proto.errors import ContextLengthExceeded
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.groups.eligibility import EligibleGroups, ServingGroups
from coatcheck.router.groups.group_connection import GroupConnection, group_kind
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.request import Request
from tests.examples import examples

MODELS = [GetModelResponse(name="m", fingerprint=mark, block_size=4, max_model_len=64) for mark in "abc"]


class ARegisteredGroup:
    """A GroupConnection of which only the registration counts."""

    def __init__(self, name: str, num_blocks: int, model: GetModelResponse, slot: int) -> None:
        self.name = name
        self.model = model
        self.group_kind = group_kind(model)
        self.registration = Registration(model=model, num_blocks=num_blocks)
        self.load = GroupLoad(self.registration, slot=slot)


def serving(sizes: list[tuple[int, int]]) -> ServingGroups:
    """Groups of these numbers of blocks, each with the model of this number."""
    slots = random.Random(0).sample(range(2 * len(sizes)), len(sizes))
    groups = [ARegisteredGroup(f"g{n}", size, MODELS[model], slots[n]) for n, (size, model) in enumerate(sizes)]
    return ServingGroups(cast(list[GroupConnection], groups))


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), max_size=8),
    st.lists(st.tuples(st.integers(0, 70), st.none() | st.integers(0, 2)), min_size=2, max_size=8),
)
def test_the_groups_are_those_that_a_loop_finds(
    sizes: list[tuple[int, int]], requests: list[tuple[int, int | None]]
) -> None:
    """For any groups and lengths: a group is eligible if the request fits its context and its blocks, and if it has the
    model of the group that had the request before. Requests of one kind that the same groups can run get the same
    object, with the slots and models of these groups."""
    groups = serving(sizes)
    found = dict[tuple[str, ...], EligibleGroups]()
    for max_len, model in requests:
        expected = [
            f"g{place}"
            for place, (size, own) in enumerate(sizes)
            if max_len <= min(64, 4 * size) and model in (None, own)
        ]
        eligible = groups.eligible(max_len, b"" if model is None else group_kind(MODELS[model]))
        assert eligible.names.tolist() == expected and len(eligible) == len(expected)
        assert eligible.slots.tolist() == [group.load.slot for group in eligible.groups]
        by_model = {eligible.groups[place].name: one for one, places in eligible.models for place in places}
        assert by_model == {group.name: group.model for group in eligible.groups}
        if model is None:
            assert found.setdefault(tuple(expected), eligible) is eligible
    assert groups.max_sequence_tokens == max((min(64, 4 * size) for size, _ in sizes), default=0)


def test_a_request_that_fits_no_group_is_refused() -> None:
    """The error has the most tokens that any group can hold. Without groups nothing is refused."""
    request = Request("r", range(50), SamplingParams(max_tokens=10, seed=1))
    with pytest.raises(ContextLengthExceeded, match="together are 60"):
        serving([(8, 0), (14, 1)]).require_eligible(request)
    assert serving([(8, 0), (15, 1)]).require_eligible(request).names.tolist() == ["g1"]
    assert len(serving([]).require_eligible(request)) == 0


def test_some_of_the_groups() -> None:
    """`only` keeps the order, slots and models of the groups that it keeps."""
    eligible = serving([(8, 0), (8, 1), (8, 0)]).eligible()
    kept = eligible.only(eligible.names != "g0")
    assert kept.names.tolist() == ["g1", "g2"] and kept.slots.tolist() == eligible.slots[1:].tolist()
    assert [(model.fingerprint, places.tolist()) for model, places in kept.models] == [("b", [0]), ("a", [1])]
