"""`coatcheck bench`: figures computed from recordings, loops that keep their promise, and the command itself."""

import asyncio
import io
import json
import signal
import sys
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.benchmark.load_generator import LoadGenerator, Recording
from coatcheck.cluster.benchmark.report import RequestSample, latency, measure, summarize
from coatcheck.cluster.benchmark.report_plot import check_plot
from coatcheck.cluster.benchmark.report_table import report_table
from coatcheck.cluster.benchmark.request_generator import RequestGenerator
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.config import MAX_STREAMS
from tests.cluster.command_line import run_here
from tests.cluster.fake_router import FakeRouter, in_background
from tests.cluster.running_server import COMMAND, coatcheck


def recording(due: float, times: list[float], counts: list[int], **final: int) -> Recording:
    made = Recording(due=due, sent=due, output_len=sum(counts))
    made.times = [times[0], *times, times[-1]]
    deltas = [pb.GenerateEvent(delta=pb.Delta(token_ids=range(count))) for count in counts]
    usage = pb.Usage(completion_tokens=sum(counts), **final)
    events = [pb.GenerateEvent(started=pb.Started()), *deltas]
    events.append(pb.GenerateEvent(final=pb.Final(usage=usage, group="group-0")))
    made.messages = [event.SerializeToString() for event in events]
    return made


def sample(due: float, times: list[float], counts: list[int], **final: int) -> RequestSample:
    measured = measure(recording(due, times, counts, **final))
    assert isinstance(measured, RequestSample)
    return measured


def test_latencies_of_one_answer() -> None:
    """TTFT counts from when the request was due, TPOT spreads the rest over the later tokens, ITL is each gap."""
    one = sample(1.0, [1.5, 1.6, 2.0], [1, 2, 2])
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.5 / 4)
    assert one.gaps == pytest.approx((0.1, 0.4))
    assert one.e2e == pytest.approx(1.0)


def test_one_token_has_no_tpot() -> None:
    """An answer of one token has no time per further token, and does not count as zero."""
    assert sample(0.0, [0.5], [1]).tpot is None
    report = summarize([sample(0.0, [0.5], [1])], seconds=1.0)
    assert report.tpot_ms is None
    assert report.itl_ms is None


@pytest.mark.parametrize(
    ("spoil", "name"), [("status", "UNAVAILABLE"), ("cut", "INCOMPLETE"), ("short", "WRONG_LENGTH")]
)
def test_what_is_not_a_whole_answer(spoil: str, name: str) -> None:
    """A failed stream, one without its end, and one of the wrong length are errors, not fast answers."""
    spoiled = recording(0.0, [0.5, 0.6], [1, 1])
    if spoil == "status":
        spoiled.status = "UNAVAILABLE"
    elif spoil == "cut":
        spoiled.messages, spoiled.times = spoiled.messages[:-1], spoiled.times[:-1]
    else:
        spoiled.output_len = 3
    assert measure(spoiled) == name


def test_report() -> None:
    """Throughput is over the whole run, goodput counts what kept every objective, errors are counted by status."""
    fast = sample(0.0, [0.1, 0.2], [1, 1], prompt_tokens=10, cached_device_tokens=4)
    late = sample(0.0, [0.5, 0.6], [1, 1], prompt_tokens=10, cached_host_tokens=6)
    slow = sample(0.0, [0.1, 0.9], [1, 1], prompt_tokens=10)
    measured: list[RequestSample | str] = [fast, late, slow, "UNAVAILABLE"]
    report = summarize(measured, 2.0, slo_ttft_ms=200, slo_tpot_ms=200, cpu_seconds=6e-4)
    assert (report.requests, report.succeeded, report.errors) == (4, 3, {"UNAVAILABLE": 1})
    assert report.success_rate == 0.75
    assert (report.output_tokens_per_second, report.total_tokens_per_second) == (3.0, 18.0)
    assert (report.goodput, report.within_slo) == (0.5, 0.25)
    assert (report.cached_device_tokens, report.cached_host_tokens) == (4, 6)
    assert report.client_cpu_us_per_token == pytest.approx(100)
    assert summarize(measured, 2.0).goodput is None


def test_percentiles() -> None:
    """Percentiles are in milliseconds and interpolate, and nothing measured is not zero."""
    measured = latency([0.001 * value for value in range(1, 102)])
    assert measured is not None
    assert (measured.mean, measured.p50, measured.p90, measured.p99) == pytest.approx((51, 51, 91, 100))
    assert latency([]) is None


@pytest.mark.parametrize(
    ("times", "is_told"), [([0.1, 0.101, 0.102, 0.103, 0.2, 0.201], True), ([0.1, 0.12, 0.15, 0.16, 0.18, 0.2], False)]
)
def test_messages_that_arrive_in_bunches_are_told(times: list[float], is_told: bool) -> None:
    """If most messages follow the one before at once, although TPOT is much longer, a note below the table says so."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report_table(summarize([sample(0.0, times, [1] * len(times))], seconds=1.0)))
    assert ("messages arrived in bunches" in console.export_text()) is is_told


async def test_closed_loop_keeps_its_concurrency() -> None:
    """At most `concurrency` clients run at once, until every request is answered."""
    async with FakeRouter() as router, LoadGenerator([router.address]) as load:
        router.crowd, ended = 3, list[None]()
        load.on_end = lambda: ended.append(None)
        await load.run_closed_loop(
            RequestGenerator(vocab_size=9, input_len=3, output_len=4).build_requests(20), concurrency=3
        )
    assert router.most_at_once == 3
    assert all(isinstance(measure(made), RequestSample) for made in load.recordings)
    assert ended == [None] * 20


async def test_a_connection_s_streams_do_not_limit_the_load() -> None:
    """More requests run at once than a router serves on one connection."""
    many = MAX_STREAMS + 1
    async with (
        FakeRouter(max_streams=MAX_STREAMS) as router,
        LoadGenerator([router.address], timeout=MAX_WAIT_SECONDS, concurrency=many) as load,
    ):
        router.crowd = many  # none is answered before the last one has come
        requests = RequestGenerator(vocab_size=9, input_len=3, output_len=1).build_requests(many)
        await load.run_closed_loop(requests, concurrency=many)
    assert router.most_at_once == many and {made.status for made in load.recordings} == {"OK"}


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Requests go out at their times however many are unanswered, and wait counts from the time they were due."""
    async with FakeRouter() as router, LoadGenerator([router.address], timeout=MAX_WAIT_SECONDS) as load:
        router.crowd = 8  # none is answered before the last one has come
        requests = RequestGenerator(vocab_size=9, input_len=3).build_requests(8, rate=100.0)
        await load.run_open_loop(requests)
    assert router.most_at_once == 8
    assert [made.due for made in load.recordings] == [request.at for request in requests]
    assert all(isinstance(measure(made), RequestSample) for made in load.recordings)


async def test_open_loop_with_a_limit() -> None:
    """A limit holds requests back, and the time they were held counts as waiting."""
    async with FakeRouter() as router, LoadGenerator([router.address], timeout=0.3) as load:
        router.stalls_after = 1
        await load.run_open_loop(
            RequestGenerator(vocab_size=9, input_len=3).build_requests(3, rate=1000.0), concurrency=1
        )
    assert router.most_at_once == 1
    assert load.recordings[2].sent - load.recordings[2].due >= 0.57


def run(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `coatcheck bench`, run in this thread."""
    done = run_here("bench", *arguments)
    return done.code, done.out, done.err


async def test_command_prints_one_object() -> None:
    """The real command with --json prints every figure as one object; the warm-up is sent and not counted."""
    async with FakeRouter() as router:
        done = await asyncio.to_thread(
            coatcheck, "bench",
            "--address", router.address, "--concurrency", "2", "--num-requests", "6", "--input-len", "4",
            "--output-len", "3", "--slo-ttft-ms", "10000", "--json", "--prompts", "shared-prefix",
            "--prefix-len", "8", "--num-prefixes", "2",
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["requests"], report["succeeded"], report["success_rate"]) == (6, 6, 1.0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (6 * 12, 6 * 3)
    assert report["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert report["goodput"] > 0
    assert len(router.requests) == 7


def test_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    """Without --json a table comes out, errors are listed by status with the first message of the server, and --plot
    writes a picture."""
    with in_background(router := FakeRouter(losses=[99, 1, 2])):
        code, out, err = run(
            "--address", router.address, "--rate", "200", "--num-requests", "8", "--output-len", "3",
            "--plot", str(tmp_path / "run.png"),
        )  # fmt: skip
    assert (code, err) == (0, f"wrote {tmp_path / 'run.png'}\n")
    assert "TTFT, time to the first token" in out
    assert "6 of 8 requests answered" in out
    assert "not answered: UNAVAILABLE 2\nfirst UNAVAILABLE: this router is going away\n" in out
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_command_replays_a_trace(tmp_path: Path) -> None:
    """--trace sends the trace's requests at its times."""
    rows = [{"timestamp": 50 * i, "input_length": 9, "output_length": 2, "hash_ids": [i]} for i in range(4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with in_background(router := FakeRouter()):
        code, out, _ = run("--address", router.address, "--trace", str(tmp_path / "trace.jsonl"), "--json")
    report = json.loads(out)
    assert (code, report["requests"], report["prompt_tokens"], report["output_tokens"]) == (0, 4, 36, 8)
    assert report["seconds"] >= 0.15


def test_command_refuses_to_measure_errors() -> None:
    """When the warm-up is refused, or no server is there, one line says so."""
    with in_background(router := FakeRouter()):
        router.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is too long")
        code, out, err = run("--address", router.address)
    assert (code, out) == (2, "")
    assert err == "error: the warm-up was refused (INVALID_ARGUMENT): the prompt is too long\n"
    code, out, err = run("--address", "127.0.0.1:1")
    assert (code, err.count("\n")) == (1, 1)
    assert "no server answers at 127.0.0.1:1" in err


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        (("--input-len", "1000000000000"), "1,000,000,000,064"),
        (("--output-len", "4000"), "4,512"),
        (("--prompts", "shared-prefix", "--prefix-len", "3521"), "4,097"),
    ],
)
def test_requests_that_are_longer_than_the_context_are_refused(flags: tuple[str, ...], tokens: str) -> None:
    """Before a prompt is made, which might not fit into memory."""
    with in_background(router := FakeRouter()):
        code, out, err = run("--address", router.address, *flags)
    assert (code, out, router.requests) == (2, "", [])
    assert err.startswith(f"error: a request would have {tokens} tokens, prompt and answer together, and the model")


@pytest.mark.parametrize("flag", ["--length-scale", "--time-scale"])
def test_a_trace_is_scaled_by_a_finite_number(flag: str) -> None:
    """`inf` and `nan` are refused as usage errors."""
    for value in ("inf", "nan"):
        code, _, err = run("--trace", "x.jsonl", flag, value)
        assert code == 2 and flag in err and "x.jsonl" not in err, err


async def test_interrupted_command_prints_what_it_has() -> None:
    """Ctrl-C ends the run with the figures of what was answered; what was not is counted apart, and is no error."""
    async with FakeRouter() as router, FakeRouter() as stalled:
        stalled.stalls_after = 1
        arguments = ["--address", router.address, "--address", stalled.address, "--warmup", "0", "--concurrency", "2"]
        arguments += ["--num-requests", "8", "--output-len", "3", "--json"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*COMMAND, "bench", *arguments, stdout=pipe, stderr=pipe)
        await asyncio.wait_for(stalled.crowded(2), 20)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    report = json.loads(out)
    assert (process.returncode, err) == (130, b"")
    assert (report["requests"], report["succeeded"], report["errors"]) == (2, 2, {})
    assert (report["unfinished"], report["output_tokens"]) == (6, 6)


def test_runs_are_kept_apart() -> None:
    """Two runs of one seed send the same prompts under different salts, unless they are to find each other's."""
    with in_background(router := FakeRouter()):
        for flags in ([], [], ["--reuse-cache"], ["--reuse-cache"]):
            run("--address", router.address, "--num-requests", "2", "--warmup", "0", *flags)
    salts = [request.cache_salt for request in router.requests]
    assert salts[0] == salts[1] and salts[2] == salts[3] and len({*salts[:4]}) == 2 and salts[4:] == [""] * 4
    assert [r.token_ids for r in router.requests[:2]] == [r.token_ids for r in router.requests[2:4]]


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, --plot names the command that installs matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(InvalidConfig, match="^--plot needs matplotlib: pip install matplotlib$"):
        check_plot(tmp_path / "run.png")


@pytest.mark.parametrize("name", ["none/run.png", "run.gif5", "."])
def test_a_plot_that_cannot_be_is_refused_first(tmp_path: Path, name: str) -> None:
    """A picture that could not be written is refused before anything is sent."""
    with in_background(router := FakeRouter()):
        code, out, err = run("--address", router.address, "--plot", str(tmp_path / name))
    assert (code, out, router.requests) == (2, "", []) and "--plot" in err


def test_command_refuses_two_models() -> None:
    """Routers of different models are not measured as one."""
    with in_background(one := FakeRouter(), other := FakeRouter()):
        other.fingerprint = "g"
        code, _, err = run("--address", one.address, "--address", other.address)
    assert code == 2
    assert "different models" in err


def test_command_refuses_two_clocks() -> None:
    """A rate and a trace cannot both say when to send."""
    code, _, err = run("--rate", "1", "--trace", "x.jsonl")
    assert code == 2
    assert "exclude each other" in err
