"""`coatcheck top`: what it draws of a status, and how it updates in a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from rich.console import Console

from coatcheck.cluster.commands.top import History, draw_bar, draw_sparkline, screen
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from tests.cluster.command_line import run_here
from tests.cluster.running_server import COMMAND

GROUP = pb.GroupStatus(
    name="group-0",
    state="serving",
    running=2,
    waiting=3,
    blocks_used=10,
    blocks_cached=20,
    blocks_total=64,
    host_blocks_used=5,
    host_blocks_total=10,
    prompt_tokens=200,
    cached_device_tokens=100,
    generated_tokens=1000,
    step_seconds=0.012,
    uptime_seconds=7300,
    restarts=2,
    ranks=[pb.RankStatus(rank=0, healthy=True), pb.RankStatus(rank=1)],
)
LATENCY = pb.LatencyStatus(p50_seconds=0.025, p90_seconds=0.03, p99_seconds=1.5, count=4000)
STATUS = pb.StatusResponse(
    router="router-0",
    state="serving",
    model=pb.GetModelResponse(name="tiny", dtype="float32", kv_dtype="int8"),
    groups=[GROUP, pb.GroupStatus(name="group-1", state="lost", reason="rank 0 ended [1]")],
    ttft=LATENCY,
    itl=LATENCY,
    queue=LATENCY,
    active_streams=5,
    hit_ratio=0.5,
)


class Admin(AdminServicer):
    """A real service on a real port that answers with STATUS, with a hundred more generated tokens each time."""

    def __init__(self) -> None:
        self.asked = 0

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        answer = pb.StatusResponse()
        answer.CopyFrom(STATUS)
        answer.groups[0].generated_tokens += 100 * self.asked
        self.asked += 1
        return answer


@pytest.fixture
def router() -> Iterator[tuple[str, Admin]]:
    """(address, service) of a router."""
    admin, server = Admin(), grpc.server(futures.ThreadPoolExecutor(2))
    add_AdminServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", admin
    server.stop(None).wait()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """After the test, signals are handled as before: `top` installs handlers in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def drawn(status: pb.StatusResponse, history: History, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(screen(status, history, width))
    console.file.close()
    return console.export_text()


def test_one_look_has_everything() -> None:
    """The screen shows groups, ranks, blocks by tier, hits, queue and every latency, and the groups' reasons as they
    are."""
    history = History()
    history.add_sample(STATUS, 10.0)
    later = pb.StatusResponse()
    later.CopyFrom(STATUS)
    later.groups[0].generated_tokens += 300
    history.add_sample(later, 12.0)
    text = drawn(later, history)
    for part in (
        "router-0", "tiny (float32, KV in int8)", "150 tokens/s", "2 run, 3 wait", "5 requests open, 50.0% hits",
        "TTFT", "TPOT", "ITL", "queue", "25.0 ms", "1,500.0 ms", "●✕", "30/64", "5/10", "12.0 ms", "lost",
        "group-1: rank 0 ended [1]",
    ):  # fmt: skip
        assert part in text, (part, text)


def test_what_is_wrong_is_said() -> None:
    """Requests that wait in the router count as waiting, with how long they wait. How requests ended, a setting that is
    refused, and how often and when a group last started are on the screen."""
    status = pb.StatusResponse()
    status.CopyFrom(STATUS)
    status.MergeFrom(pb.StatusResponse(queued_requests=1200, queue_seconds=7.25, configuration="refused: no tp"))
    for outcome, count in (("ok", 3000), ("queue_full", 41), ("unavailable", 1)):
        status.outcomes.add(outcome=outcome, count=count)
    history = History()
    history.add_sample(status, 10.0)
    text = drawn(status, history)
    for part in (
        "2 run, 1,203 wait", "settings: refused: no tp", "requests wait for up to 7.2 s",
        "1 of 2 groups serving; requests of the last 5 min: 3,000 ok, 41 queue_full, 1 unavailable",
        "group-0: 2 restarts, the last 2 h ago", "group-1: rank 0 ended [1]",
    ):  # fmt: skip
        assert part in text, (part, text)
    assert list(history.waiting) == [1203]


def test_eighty_columns_are_enough() -> None:
    """In a terminal of 80 columns every column keeps its title and its figures; only the bars are shorter."""
    status, history = pb.StatusResponse(), History()
    status.CopyFrom(STATUS)
    status.groups[0].MergeFrom(pb.GroupStatus(running=256, blocks_cached=27_690, blocks_total=27_700, step_seconds=0.1))
    for second in range(80):
        status.groups[0].generated_tokens += 40 * second
        history.add_sample(status, float(second))
    text = drawn(status, history, 80)
    for part in ("state", "ranks", "runs", "waits", "hits", "50.0%", "100.0 ms", "lost", "27,700/27,700", "blocks"):
        assert part in text, (part, text)
    assert "…" not in text
    assert re.search(r"^3,160 tokens/s .*█ +256 run, 3 wait .* 5 requests open, 50.0% hits$", text, re.MULTILINE), text


def test_bars_are_to_scale() -> None:
    """A number above zero has at least one cell, no bar is longer than the width, and a missing tier is shown as
    off."""
    assert str(draw_bar(0, 0, 0, 28)) == "off"
    for used, cached, total in ((1, 0, 10_000), (0, 1, 10_000), (5, 5, 10), (9999, 1, 10_000), (0, 0, 7)):
        drawn_bar = str(draw_bar(used, cached, total, 28)).split(" ")[0]
        assert len(drawn_bar) == 28
        assert (drawn_bar.count("█") > 0) == (used + cached > 0)
    assert draw_sparkline(deque([0, 1, 2]), 3) == " ▄█" and draw_sparkline(deque([9, 1, 2]), 2) == "▄█"
    assert draw_sparkline(deque(), 3) == "" and draw_sparkline(deque([0]), 3) == " "
    assert draw_sparkline(deque([1]), 0) == ""


def test_a_group_that_began_anew_is_no_negative_rate() -> None:
    """If the token counter of a restarted group falls, the rate is zero."""
    history = History()
    history.add_sample(STATUS, 1.0)
    history.add_sample(pb.StatusResponse(), 2.0)
    assert list(history.rates) == [0]


def test_once_and_json(router: tuple[str, Admin], own_signals: None) -> None:
    """--once ends after two samples, which give a rate. With --json it prints one object with every field."""
    address, admin = router
    shown = run_here("top", "--address", address, "--once", "--every", "0.1", environment={"COLUMNS": "130"})
    assert shown.code == 0 and "group-0" in shown.out and "30/64" in shown.out
    assert re.search(r"^[1-9][\d,]* tokens/s", shown.out, re.MULTILINE)
    said = json.loads(run_here("top", "--address", address, "--once", "--json").out)
    assert said["itl"]["count"] == 4000 and said["groups"][0]["blocks_cached"] == 20
    assert admin.asked == 3


def test_it_follows_in_a_terminal(router: tuple[str, Admin]) -> None:
    """In a terminal it draws again and again, with the rate, until Ctrl-C, and then restores the terminal."""
    address, _ = router
    primary, secondary = pty.openpty()
    command = [*COMMAND, "top", "--address", address, "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "40"}
    with subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment) as process:
        os.close(secondary)
        seen = b""
        while not re.search(rb"[1-9]\d* tokens/s|[1-9]\d*\x1b\[0m tokens/s", seen):
            seen += os.read(primary, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(primary, 65536):
                seen += more
        except OSError:
            pass  # its end of the terminal is closed
    os.close(primary)
    assert b"group-0" in seen and b"Traceback" not in seen
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
