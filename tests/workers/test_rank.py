"""A group's ranks as real processes over gloo, on a tiny checkpoint: they serve and end together."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from coatcheck.kernels import native
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.rank import choose_device
from coatcheck.workers.rank_loading import advise_on_gpu_memory
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.rank_client import generate, read_load, read_registration
from tests.workers.rank_group import RankGroup


def group_of(checkpoints: Path, **settings: object) -> RankGroup:
    """Start a group on a tiny llama. `settings` of GroupConfig; by default a pool of one megabyte."""
    path = str(tiny_checkpoint("llama", checkpoints))
    settings = {"kv_memory": 1 << 20, "dtype": "float32", "device": "cpu", "threads": 1, **settings}
    return RankGroup(GroupConfig("g", path, "tiny", **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(checkpoint_directory: Path) -> Iterator[str]:
    """The address of a group of one rank, for tests that leave it as it is."""
    group = group_of(checkpoint_directory)
    yield group.wait_ready()
    group.kill()


@pytest.fixture
def start(checkpoint_directory: Path) -> Iterator[Callable[..., RankGroup]]:
    """Starts groups, and kills them after the test."""
    groups: list[RankGroup] = []

    def start(**settings: object) -> RankGroup:
        groups.append(group_of(checkpoint_directory, **settings))
        return groups[-1]

    yield start
    for group in groups:
        group.kill()


def test_two_ranks_report_themselves_answer_as_one_and_end_when_told(
    start: Callable[..., RankGroup], plain: str
) -> None:
    """A group of two reports each rank's process and memory, and gives the tokens that a group of one gives; told to
    stop, every rank exits 0."""
    group = start(tp=2)
    address = group.wait_ready()
    with grpc.insecure_channel(address) as channel:
        registration, status = read_registration(channel), read_load(channel).status
    assert [rank.pid for rank in status.ranks] == [process.pid for process in group.processes]
    assert all(rank.healthy and rank.peak_memory_bytes > 1 << 20 for rank in status.ranks)
    assert all(rank.weight_bytes > 0 for rank in status.ranks)
    assert registration.model.name == "tiny" and registration.tp == 2
    assert registration.num_blocks == status.blocks_total > 0
    assert status.blocks_used == status.prompt_tokens == 0  # the warm-up is not counted
    answers = [generate(each, list(range(3, 43)), 12) for each in (plain, address)]
    assert answers[0] == answers[1] and len(answers[0]) == 12
    group.pipes[0].send("stop")
    assert set(group.exit_codes()) == {0}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_rank_ends_its_group(start: Callable[..., RankGroup], victim: int) -> None:
    """When one rank is killed while the group idles, the other exits non-zero within seconds: nothing hangs."""
    group = start(tp=2)
    group.wait_ready()
    os.kill(group.processes[victim].pid or 0, signal.SIGKILL)
    codes = group.exit_codes()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1


@pytest.mark.parametrize(
    "kv_dtype", [pytest.param("fp8", marks=pytest.mark.full), "int8", pytest.param("int4", marks=pytest.mark.full)]
)
def test_a_quantised_pool_serves_and_is_registered(start: Callable[..., RankGroup], plain: str, kv_dtype: str) -> None:
    """The same memory holds more blocks. The registration has the dtype: streams fail over to equal groups only."""
    registrations = []
    for address in (plain, start(kv_dtype=kv_dtype, tp=2).wait_ready()):
        assert len(generate(address, list(range(3, 43)), 12)) == 12
        with grpc.insecure_channel(address) as channel:
            registrations.append(read_registration(channel))
    assert [registration.model.kv_dtype for registration in registrations] == ["float32", kv_dtype]
    assert registrations[1].num_blocks > 3 * registrations[0].num_blocks  # float32 beside eight bits, over two ranks


def test_a_pool_too_small_is_refused_by_every_rank(start: Callable[..., RankGroup]) -> None:
    """A pool too small for a block is an InvalidConfig with what to change, not a crash."""
    for failure in start(tp=2, kv_memory=100).failures():
        assert failure.startswith("InvalidConfig: kv-memory gives 100 bytes a rank")


def test_more_host_memory_than_the_machine_has_is_refused(start: Callable[..., RankGroup]) -> None:
    """More host memory than the machine has is an InvalidConfig with what to change, before anything is allocated."""
    (failure,) = start(host_kv_memory=float(1 << 50)).failures()
    assert failure.startswith("InvalidConfig: host-kv-memory asks for 1,125,899,906,842,624 bytes")
    assert failure.endswith("lower host-kv-memory, or set it to 0")


def test_memory_does_not_grow_under_load(start: Callable[..., RankGroup]) -> None:
    """The memory of two ranks differs by the bytes of their pools, within 1%, and does not grow under load that evicts,
    demotes and restores."""
    # Blocks of 32 tokens, because the bookkeeping takes about 50 bytes a block.
    small, large = (
        start(kv_memory=1 << 20, block_size=32),
        start(kv_memory=4 << 20, host_kv_memory=1 << 30, block_size=32),
    )
    addresses = [group.wait_ready() for group in (small, large)]
    reserved = 0
    for address, sign in zip(addresses, (-1, 1), strict=True):
        with grpc.insecure_channel(address) as channel:
            registration, status = read_registration(channel), read_load(channel).status
        assert (status.restore_tokens_per_second > 0) == (sign > 0), "the first copies are measured already"
        blocks = registration.num_blocks + registration.host_blocks
        reserved += sign * blocks * status.bytes_per_block
        generate(address, list(range(3, 150)), 8)
    before = [resident(group) for group in (small, large)]
    assert before[1] - before[0] == pytest.approx(reserved, rel=0.01)
    for i in range(20):
        generate(addresses[1], [(i * 7 + j * (i % 5 + 1)) % 190 + 3 for j in range(200)], 20)
    assert resident(large) - before[1] < 0.01 * reserved


def resident(group: RankGroup) -> int:
    """Resident anonymous memory of the group's one process, in bytes."""
    status = Path(f"/proc/{group.processes[0].pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def test_a_processor_class_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a CPU refuses a COATCHECK_CPU that the processor lacks, and the message says what it has."""
    monkeypatch.setenv(native.CPU_CLASS_VARIABLE, "avx9000")
    native._load.cache_clear()
    try:
        with pytest.raises(InvalidConfig, match="COATCHECK_CPU: expected one of generic.*got 'avx9000'"):
            choose_device("cpu")
    finally:
        monkeypatch.undo()
        native._load.cache_clear()


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the GPU's compute capability and the one that the kernels need."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(InvalidConfig, match=r"GPU 1 has compute capability 7.5, and the kernels need 8.0"):
        choose_device("cuda", 1)


def test_a_gpu_whose_memory_is_full_is_explained() -> None:
    """The error has torch's reason and what to change, in one line, because the last line of an error is shown."""
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try setting x."
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB\. Lower max-batch-tokens.+ the GPU$"):
        with advise_on_gpu_memory():
            raise torch.OutOfMemoryError(said)
