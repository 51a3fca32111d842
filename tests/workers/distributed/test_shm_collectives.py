"""Collectives through shared memory, between real processes."""

import errno
import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.shm_collectives import ShmCollectives
from tests.workers.ranks import run_ranks

# Around the edges of a buffer of 1 MiB, and so several pieces.
COUNTS = (0, 1, 255, 256, 257, 262_143, 262_144, 262_145, 700_001)


def part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1_000_003 + count)
    return torch.randn(count, generator=generator).to(dtype)


def add_up(communicator: Communicator, dtypes: tuple[torch.dtype, ...]) -> dict[tuple[torch.dtype, int], bool]:
    """Whether each all-reduce equals the sum in rank order, rounded once."""
    right = {}
    for dtype in dtypes:
        for count in COUNTS:
            parts = [part(rank, count, dtype) for rank in range(communicator.size)]
            want = torch.zeros(count)
            for theirs in parts:
                want += theirs.float()
            have = communicator.all_reduce(parts[communicator.rank].clone())
            gathered = communicator.all_gather(parts[communicator.rank], dim=0)
            right[dtype, count] = torch.equal(have, want.to(dtype)) and torch.equal(gathered, torch.cat(parts))
    return right


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
def test_sums_are_exact_and_the_same_everywhere(size: int) -> None:
    """Every rank gets the float32 sum in rank order, rounded once, for any length, in float32 and bfloat16."""
    dtypes = (torch.float32, torch.bfloat16)
    right = {(dtype, count): True for dtype in dtypes for count in COUNTS}
    assert run_ranks(size, add_up, dtypes) == [right] * size


def stumble(communicator: Communicator, calls: int) -> bool:
    """Random collectives with random delays: none, one shorter than the spinning, or one long enough to sleep."""
    late, shared = random.Random(communicator.rank), communicator._shared
    assert shared is not None
    right = True
    for call in range(calls):
        time.sleep(late.choice((0.0,) * 30 + (0.0002, 0.002)))
        x = torch.full((call % 700,), float(communicator.rank + call))
        match call % 3:
            case 0:
                shared.all_reduce(x)
                right &= bool((x == 2.0 * call + 1.0).all())
            case 1:
                both = shared.all_gather(x)
                right &= bool((both[0] == call).all() and (both[1] == call + 1).all())
            case _:
                shared.broadcast(x)
                right &= bool((x == call).all())
    return right


def test_ranks_may_be_late_at_any_call() -> None:
    """Thousands of all-reduces, gathers and broadcasts give the right results although ranks are late at random."""
    assert run_ranks(2, stumble, 3000) == [True, True]


def leave(communicator: Communicator, _: Any) -> list[str]:
    """The names of our files in /dev/shm after all ranks have joined."""
    assert communicator.uses_shared_memory
    communicator.barrier()
    return [path.name for path in Path("/dev/shm").glob("coatcheck-*") if path.stat().st_uid == os.getuid()]


def test_nothing_is_left_behind() -> None:
    """The shared file is unlinked once all ranks have mapped it, so that no crash leaves it behind."""
    before = {path.name for path in Path("/dev/shm").glob("coatcheck-*")}
    for names in run_ranks(2, leave, None):
        assert not set(names) - before


def test_ranks_of_different_hosts_do_not_share() -> None:
    """If a rank is on another host, `connect` returns None and removes the file."""
    paths: list[str] = []

    def elsewhere(value: dict[str, Any]) -> list[dict[str, Any]]:
        if "path" not in value:
            return [value, value]
        paths.append(value["path"])
        return [value, value | {"host": "another host"}]

    assert ShmCollectives.connect(0, 2, elsewhere, timeout_seconds=1.0) is None
    assert paths[0].startswith("/dev/shm/") and not os.path.exists(paths[0])


def test_a_rank_without_memory_for_the_file_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank cannot map the file, for example because of `ulimit -v`, `connect` returns None on every rank, and the
    file is removed."""

    def refuse(file: int, length: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    paths: list[str] = []

    def both(value: dict[str, Any]) -> list[dict[str, Any]]:
        paths.append(value.get("path", ""))
        return [value, value]

    assert ShmCollectives.connect(0, 2, both, timeout_seconds=1.0) is None
    assert paths[0].startswith("/dev/shm/") and not os.path.exists(paths[0])
