"""The collectives of Communicator, between real processes."""

import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.workers.distributed.communicator import Communicator
from tests.workers.ranks import run_ranks

TIMEOUT_SECONDS = 2.0  # of a collective
LENGTHS = (0, 1, 2047, 2048, 5000)  # around the ints that the first broadcast carries


def speak(communicator: Communicator, _: Any) -> dict[str, Any]:
    """The work of one rank: each collective at least once. Returns the results."""
    mine = torch.full((2, 3), float(communicator.rank + 1))
    said: dict[str, Any] = {"ints": []}
    for length in LENGTHS:
        values = array("i", range(-length, 0)) if communicator.rank == 0 else None
        said["ints"].append(communicator.broadcast_ints(values).tolist())
    said["last"] = communicator.all_gather(mine).tolist()
    said["first"] = communicator.all_gather(mine, dim=0).tolist()
    said["sum"] = communicator.all_reduce(mine).tolist()
    said["minimum"] = communicator.all_reduce_min([5, communicator.rank, -communicator.rank])
    said["json"] = communicator.all_gather_json({"rank": communicator.rank})
    said["shared"] = communicator.uses_shared_memory
    said["float16"] = communicator.all_reduce(torch.full((5,), 0.5, dtype=torch.float16)).tolist()
    said["bfloat16"] = communicator.all_reduce(torch.full((5,), 0.5, dtype=torch.bfloat16)).tolist()
    return said


@pytest.mark.parametrize("share_memory", [False, True])
def test_collectives_give_all_ranks_the_same(share_memory: bool) -> None:
    """All ranks get the same sums, gathered tensors in rank order and broadcast ints, over gloo and shared memory."""
    for said in run_ranks(2, speak, None, share_memory=share_memory):
        assert said["shared"] == share_memory
        assert said["float16"] == [1.0] * 5
        assert said["ints"] == [list(range(-length, 0)) for length in LENGTHS]
        assert said["last"] == [[1.0] * 3 + [2.0] * 3] * 2
        assert said["first"] == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
        assert said["sum"] == [[3.0] * 3] * 2
        assert said["bfloat16"] == [1.0] * 5
        assert said["minimum"] == [5, 0, -1]
        assert said["json"] == [{"rank": 0}, {"rank": 1}]


def be_late(communicator: Communicator, rank_0_gave_up: Path) -> str:
    """Rank 1 sleeps for longer than a collective may take before a barrier, and skips a later collective."""
    if communicator.rank == 1:
        time.sleep(1.5 * TIMEOUT_SECONDS)
    communicator.barrier()
    said = communicator.all_reduce(torch.ones(1)).tolist()
    if communicator.rank == 1:
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while not rank_0_gave_up.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return "asleep"
    with pytest.raises(RuntimeError):
        communicator.all_reduce(torch.ones(1))
    rank_0_gave_up.touch()
    return str(said)


def test_ranks_wait_longer_for_each_other_to_load_than_in_a_step(tmp_path: Path) -> None:
    """`barrier` waits for a late rank up to the startup timeout. Other collectives raise after the shorter timeout."""
    answers = run_ranks(2, be_late, tmp_path / "gave up", timeout_seconds=TIMEOUT_SECONDS)
    assert answers == ["[2.0]", "asleep"]


def go_silent(communicator: Communicator, _: Any) -> str:
    """Rank 1 ends its process. Returns the error that rank 0 gets."""
    if communicator.rank == 1:
        return "left"
    with pytest.raises(RuntimeError) as caught:
        communicator.all_reduce(torch.ones(1))
    return str(caught.value)


@pytest.mark.parametrize("share_memory", [False, True])
def test_lost_rank_is_an_error(share_memory: bool) -> None:
    """A collective with a rank whose process has ended raises at once, not after the timeout of a day."""
    answers = run_ranks(2, go_silent, None, share_memory=share_memory, timeout_seconds=86400.0)
    assert answers[1] == "left"
    assert answers[0]


def test_group_of_one_never_starts_torch_distributed() -> None:
    """In a group of one rank every collective returns its input."""
    alone = Communicator()
    x = torch.arange(4.0)
    assert alone.all_reduce(x) is x
    assert alone.all_gather(x) is x
    assert alone.broadcast_ints(array("i", [1, 2])).tolist() == [1, 2]
    assert alone.all_gather_json({"rank": 0}) == [{"rank": 0}]
    assert not torch.distributed.is_initialized()
