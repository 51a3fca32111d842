"""All-reduces through memory that the ranks of one host have mapped: the choice, the results, and refusals."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as symm_mem

from coatcheck.workers.distributed import symmetric_memory
from coatcheck.workers.distributed.all_reduce_choice import BUFFER_BYTES, AllReduce, Links, choose_all_reduce
from coatcheck.workers.distributed.communicator import Communicator, describe_nccl_failure
from tests.simulated_gpu.peers import SimulatedPeers
from tests.workers.ranks import run_ranks

CPU = torch.device("cpu")
NVLINK, SWITCH, PCIE = Links(True, False), Links(True, True), Links(False, False)
KIB = 1 << 10


@pytest.mark.parametrize(
    ("nbytes", "ranks", "links", "want"),
    [
        (16 * KIB, 8, NVLINK, AllReduce.ONE_SHOT),
        (16 * KIB, 6, NVLINK, AllReduce.ONE_SHOT),
        (512 * KIB, 8, NVLINK, AllReduce.TWO_SHOT),
        (512 * KIB, 8, SWITCH, AllReduce.MULTIMEM),
        (512 * KIB, 6, NVLINK, AllReduce.NCCL),  # torch has no two-shot kernel for six ranks
        (2 * KIB * KIB, 2, SWITCH, AllReduce.TWO_SHOT),
        (BUFFER_BYTES + 1, 8, SWITCH, AllReduce.NCCL),
        (16 * KIB, 2, PCIE, AllReduce.ONE_SHOT),
        (16 * KIB, 4, PCIE, AllReduce.NCCL),
    ],
)
def test_size_ranks_and_links_choose_the_all_reduce(nbytes: int, ranks: int, links: Links, want: AllReduce) -> None:
    """Small tensors take one exchange, larger ones two or the switch, and NCCL the rest."""
    assert choose_all_reduce(nbytes, ranks, links, in_rank_order=False) is want


def test_in_rank_order_no_size_takes_nccl_or_the_switch() -> None:
    """In deterministic mode only kernels that add the ranks in order are chosen, with any links."""
    chosen = {
        choose_all_reduce(nbytes, ranks, links, in_rank_order=True)
        for nbytes in (4, KIB, 1 << 18, 1 << 20, BUFFER_BYTES, 1 << 30)
        for ranks in (2, 3, 4, 8, 16)
        for links in (NVLINK, SWITCH, PCIE)
    }
    assert chosen == {AllReduce.ONE_SHOT, AllReduce.TWO_SHOT}


def add(communicator: Communicator, argument: tuple[str, bool]) -> dict[str, Any]:
    """The work of one rank: sums of several sizes through peer memory. Returns checksums and which operators ran."""
    folder, in_rank_order = argument
    rank, size = communicator.rank, communicator.size
    peers = SimulatedPeers(Path(folder), rank, size, None, multicast=False)
    communicator._sum_in_rank_order = in_rank_order
    communicator.map_peer_memory(CPU)
    communicator._shared = None  # as on GPUs
    sums: list[float] = []
    for dtype in (torch.bfloat16, torch.float32):
        # One-shot, one-shot, two-shot, and more than a buffer holds.
        for rows in (1, 64, 400, 1100):
            parts = [torch.randn(rows, 4096, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
            x = parts[rank].clone()
            assert communicator.all_reduce(x) is x
            want = parts[0]
            for part in parts[1:]:
                want = want + part
            assert torch.equal(x, want), (dtype, rows)
            sums.append(x.double().sum().item())
    half = torch.full((2, 8), 0.5, dtype=torch.float16)
    assert communicator.all_reduce(half).tolist() == [[1.0] * 8] * 2  # not by peer memory
    small, large = torch.zeros(4, 64), torch.zeros(4096, 4096)
    fuses = [communicator.peer_memory_for(x) is not None for x in (small, large, small.half())]
    return {"sums": sums, "calls": peers.calls, "fuses": fuses}


@pytest.mark.parametrize("in_rank_order", [False, True])
def test_sums_through_peer_memory_are_those_of_the_ranks(tmp_path: Path, in_rank_order: bool) -> None:
    """Every rank gets the same sum from one-shot and two-shot all-reduces, and from NCCL's place for larger tensors.

    In rank order larger tensors go in slices, and no norm is fused.
    """
    first, second = run_ranks(2, add, (str(tmp_path), in_rank_order))
    assert first == second
    # bfloat16 takes 8 KiB a row, float32 16 KiB: 1,100 rows are 8.6 MiB and 17.2 MiB.
    bfloat16, float32 = ["one-shot", "one-shot", "two-shot"], ["one-shot", "one-shot", "two-shot"]
    slices = [["two-shot"] * 2, ["two-shot"] * 3] if in_rank_order else [[], []]
    assert first["calls"] == bfloat16 + slices[0] + float32 + slices[1]
    assert first["fuses"] == [not in_rank_order, False, False]


def test_ranks_that_cannot_map_each_other_use_nccl_and_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names the hosts, the GPUs, or what torch lacks; every rank falls back."""
    rank = {"host": "a", "gpu": 0, "reason": ""}
    obstacle = symmetric_memory.common_obstacle
    assert "on 2 hosts" in obstacle([rank, rank | {"host": "b"}])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    assert "GPU 0 cannot map the memory of GPU 3" in obstacle([rank, rank | {"gpu": 3}])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: True)
    assert obstacle([rank, rank | {"gpu": 3}]) == ""

    def everyone(value: dict[str, Any]) -> list[dict[str, Any]]:
        return [value, value]

    monkeypatch.setattr(symm_mem, "get_backend", lambda device: None)  # as a torch without CUDA
    with caplog.at_level(logging.WARNING):
        found = symmetric_memory.SymmetricMemory.connect(
            0, 2, torch.device("cuda", 0), everyone, lambda: None, in_rank_order=False
        )
    assert found is None
    assert [record.levelname for record in caplog.records if "NCCL alone" in record.message] == ["WARNING"]
    assert "\n" not in caplog.messages[0]


def connect_without_memory_on_one_rank(communicator: Communicator, argument: tuple[str, str]) -> dict[str, Any]:
    """The work of one rank. On rank 1 the named function fails; the other ranks must not wait for it."""
    folder, failing = argument
    SimulatedPeers(Path(folder), communicator.rank, communicator.size, None, multicast=False)
    entered: list[str] = []
    rendezvous = symm_mem.rendezvous

    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 8 MiB")

    def enter(*args: Any) -> Any:
        entered.append("rendezvous")
        return rendezvous(*args)

    setattr(symm_mem, "rendezvous", enter)  # noqa: B010  # mypy refuses the assignment of another signature
    setattr(torch.cuda, "can_device_access_peer", lambda first, second: True)  # noqa: B010
    if communicator.rank == 1:
        setattr(symm_mem if failing == "empty" else torch.cuda, failing, fail)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(symmetric_memory.__name__).addHandler(handler)
    found = symmetric_memory.SymmetricMemory.connect(
        communicator.rank,
        communicator.size,
        torch.device("cpu", communicator.rank),
        communicator.all_gather_json,
        communicator.barrier,
        in_rank_order=False,
    )
    total = communicator.all_reduce(torch.ones(4)).tolist()  # the ranks still make the same calls
    return {"connected": found is not None, "entered": entered, "lines": lines, "total": total}


@pytest.mark.parametrize("failing", ["empty", "can_device_access_peer"])
def test_a_rank_without_a_buffer_does_not_leave_the_others_waiting(tmp_path: Path, failing: str) -> None:
    """If one rank cannot allocate, or cannot ask about peers, no rank enters the rendezvous; rank 0 logs one line."""
    ranks = run_ranks(3, connect_without_memory_on_one_rank, (str(tmp_path), failing))
    assert [rank["connected"] for rank in ranks] == [False] * 3
    assert [rank["entered"] for rank in ranks] == [[]] * 3
    assert [len(rank["lines"]) for rank in ranks] == [1, 0, 0]
    assert "NCCL alone" in ranks[0]["lines"][0] and "CUDA out of memory." in ranks[0]["lines"][0]
    assert "\n" not in ranks[0]["lines"][0]
    assert [rank["total"] for rank in ranks] == [[3.0] * 4] * 3


def test_an_nccl_that_cannot_start_says_what_to_change() -> None:
    """NCCL's last line and three things to check are one line."""
    error = RuntimeError("NCCL error in: x.cpp:1\nncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 0 and 1")
    said = describe_nccl_failure(error, torch.device("cuda", 0))
    assert "Duplicate GPU detected" in said and "a GPU of its own" in said and "\n" not in said
    assert describe_nccl_failure(RuntimeError(), CPU).startswith("NCCL could not start")
