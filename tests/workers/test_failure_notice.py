"""A group that fails: the failure notice to its routers and the crash records, with real processes that crash."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.host.crash_record import read_crash
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.crashing_rank import FAULTS, LAST_FAULTS, LAST_IS_KILLED, LAST_RAISES, RAISES, CrashingRank
from tests.workers.rank_group import RankGroup

Start = Callable[..., tuple[RankGroup, str]]


@pytest.fixture
def start(checkpoint_directory: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a group of CrashingRanks. Return the group and the prefix of its crash records."""
    groups: list[RankGroup] = []
    path = str(tiny_checkpoint("llama", checkpoint_directory))

    def start(tp: int, **settings: Any) -> tuple[RankGroup, str]:
        config = GroupConfig(
            "g", path, "tiny", tp=tp, kv_memory=1 << 20, dtype="float32", device="cpu", threads=1, **settings
        )
        base = f"{tmp_path}/own/g.{len(groups)}"
        groups.append(RankGroup(config, CrashingRank, base))
        return groups[-1], base

    yield start
    for group in groups:
        group.kill()


def failure_notice(address: str, *prompts: int) -> wire.FailureNotice | None:
    """The failure notice of a group that these submissions end, or None if the stream breaks without one."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    submits = [
        wire.Submit(id=number, prompt_token_ids=[token, 5, 6], sampling=sampling)
        for number, token in enumerate(prompts, 1)
    ]
    sent = [wire.ToGroup(hello=wire.Hello(router="test")), *(wire.ToGroup(submit=submit) for submit in submits)]
    said, ended = None, threading.Event()
    with grpc.insecure_channel(address) as channel:
        try:
            for message in WorkerStub(channel).Attach(_then_wait(sent, ended)):
                if message.HasField("failure_notice"):
                    said = message.failure_notice
        except grpc.RpcError:
            return said
        finally:
            ended.set()
    return said


def _then_wait(messages: list[wire.ToGroup], ended: threading.Event) -> Iterator[wire.ToGroup]:
    yield from messages
    ended.wait(60)


@pytest.mark.parametrize(
    ("tp", "token", "word", "record"),
    [
        pytest.param(1, RAISES, *["rank 0: ValueError: a defect"] * 2, marks=pytest.mark.full),
        (1, FAULTS, None, "rank 0: Segmentation fault"),
        (2, LAST_RAISES, *["rank 1: ValueError: a defect"] * 2),
        pytest.param(
            2, LAST_FAULTS, "rank 1: Segmentation fault", "rank 1: Segmentation fault", marks=pytest.mark.full
        ),
        (2, LAST_IS_KILLED, None, ""),
    ],
)
def test_a_failing_group_tells_its_routers_why(
    start: Start, tp: int, token: int, word: str | None, record: str
) -> None:
    """A router gets the reason, whichever rank failed. A fault of rank 0 is only in its crash record. A killed rank
    gives no reason."""
    group, base = start(tp)
    said = failure_notice(group.wait_ready(), token)
    assert (said.reason if said else None) == word
    assert None not in group.exit_codes()
    assert read_crash(base, list(range(tp)), tp) == record
    assert read_crash(f"{base}9", list(range(tp)), tp) is None, "on another host nothing is known"


def test_the_failure_notice_names_unstarted_requests(start: Start) -> None:
    """With room for one sequence, the submission behind the one that ends the group has not started."""
    group, _ = start(1, max_num_seqs=1)
    said = failure_notice(group.wait_ready(), 5, RAISES, 5)  # all three arrive before the first ends
    assert said is not None and list(said.unstarted) == [3]


def test_an_abort_of_one_of_several_ranks_is_no_crash(tmp_path: Path) -> None:
    """torch aborts a rank whose NCCL peer is gone, so SIGABRT counts as a crash in a group of one rank only."""
    (folder := tmp_path / "records").mkdir(mode=0o700)
    base = f"{folder}/g.0"
    for rank in (0, 1):
        Path(f"{base}.rank-{rank}.crash").write_text("Fatal Python error: Aborted\n\nThread 0x1:\n" if rank else "")
    assert read_crash(base, [0, 1], 2) is None
    assert read_crash(base, [1], 1) == "rank 1: Aborted"


def test_the_log_says_where_a_faults_trace_is(tmp_path: Path) -> None:
    """The log names the file that has the stack trace of a fault."""
    code = (
        "import ctypes, logging, sys; from coatcheck.workers.host.crash_record import CrashRecord\n"
        "def at_fault(): ctypes.string_at(0)\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "CrashRecord(sys.argv[1], 1, 2).open_record(); at_fault()\n"
    )
    told = subprocess.run([sys.executable, "-c", code, base := f"{tmp_path}/own/g.0"], capture_output=True, text=True)
    assert told.returncode == -signal.SIGSEGV
    path = told.stderr.strip().rpartition("its stack is written to ")[2]
    assert read_crash(base, [1], 2) == "rank 1: Segmentation fault"
    assert "in at_fault" in Path(path).read_text()
