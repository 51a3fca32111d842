"""`coatcheck bench`: sends load to running routers and reports latencies, throughput and errors as clients see them.

Closed loop: `--concurrency` clients, each sending its next request when the previous one ends. Open loop: Poisson
arrivals, or the arrival times of a trace.
"""

import asyncio
import json
import secrets
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coatcheck.cluster.benchmark.load_generator import INTERRUPTED, LoadGenerator, Recording
from coatcheck.cluster.benchmark.report import Report, RequestSample, measure, summarize
from coatcheck.cluster.benchmark.report_plot import check_plot, plot_report
from coatcheck.cluster.benchmark.report_table import report_table
from coatcheck.cluster.benchmark.request_generator import BenchRequest, Prompts, RequestGenerator
from coatcheck.cluster.benchmark.request_trace import read_trace
from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.client.request_builder import LONGEST_TIMEOUT
from coatcheck.cluster.config.address import RouterAddresses, check_addresses
from coatcheck.proto.errors import InvalidConfig, error_of
from coatcheck.proto.stubs import coatcheck_pb2 as pb

_EXIT_INTERRUPTED = 130

_COLUMNS = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())

_LOAD = partial(typer.Option, rich_help_panel="Load")
_PROMPTS = partial(typer.Option, rich_help_panel="Prompts")


@with_credentials
def bench(
    address: RouterAddresses = None,
    concurrency: Annotated[
        int | None, _LOAD(min=1, help="Closed loop: clients (default 1). Open loop: max requests at once.")
    ] = None,
    num_requests: Annotated[
        int | None, _LOAD(min=1, help="Requests to send. Default: 10 per client, or the whole trace.")
    ] = None,
    rate: Annotated[float | None, _LOAD(min=0.001, help="Open loop: requests a second, Poisson.")] = None,
    trace: Annotated[
        Path | None, _LOAD(help="Open loop: arrival times and lengths of a trace (.jsonl, .csv, .gz).")
    ] = None,
    time_scale: Annotated[
        float, _LOAD(min=0.0, max=1e6, help="Multiplies the trace's times: 0.5 is twice as fast.")
    ] = 1.0,
    length_scale: Annotated[float, _LOAD(min=0.0001, max=1e4, help="Multiplies the trace's lengths.")] = 1.0,
    prompts: Annotated[Prompts, _PROMPTS(help="Random ids, one fixed prompt, or shared prefixes.")] = "random",
    prompt: Annotated[str | None, _PROMPTS(help="Use this text as every prompt.")] = None,
    input_len: Annotated[int, _PROMPTS(min=1, help="Prompt tokens, without a shared prefix.")] = 512,
    output_len: Annotated[int, _PROMPTS(min=1, max=2**31, help="Tokens to generate; end-of-sequence is ignored.")] = 64,
    num_prefixes: Annotated[int, _PROMPTS(min=1, help="Number of shared prefixes, used round-robin.")] = 4,
    prefix_len: Annotated[int, _PROMPTS(min=1, help="Tokens of each shared prefix.")] = 1024,
    temperature: Annotated[float, _PROMPTS(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, _PROMPTS(min=0, max=2**63 - 1, help="Seed of prompts and arrivals.")] = 0,
    warmup: Annotated[int, _LOAD(min=0, help="Requests sent before the measurement, with other prompts.")] = 1,
    reuse_cache: Annotated[
        bool,
        _PROMPTS(
            "--reuse-cache",
            help="Reuse what an earlier run with the same seed left in the cache. Default: each run has a new cache"
            " salt.",
        ),
    ] = False,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput counts requests with at most this TTFT.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Goodput counts requests with at most this TPOT.")] = None,
    timeout: Annotated[
        float | None, _LOAD(min=0.001, max=LONGEST_TIMEOUT, help="Timeout of a request in seconds.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the run to this file.")] = None,
    *,
    credentials: Credentials,
) -> None:
    """Send load to a server and measure it."""
    if rate is not None and trace is not None:
        raise typer.BadParameter("--rate and --trace exclude each other: a trace has its own arrival times")
    addresses = check_addresses(address)
    if plot is not None:
        check_plot(plot)  # before the run
    entries = read_trace(trace, num_requests) if trace is not None else None
    model = asyncio.run(_get_model(addresses, credentials))
    if trace is None and prompt is None:
        shared = prefix_len if prompts == "shared-prefix" else 0
        _check_length(input_len + shared + output_len, model.max_model_len)
    salt = "" if reuse_cache else secrets.token_hex(8)
    generator = RequestGenerator(
        vocab_size=model.vocab_size, seed=seed, prompts=prompts, input_len=input_len, output_len=output_len,
        num_prefixes=num_prefixes, prefix_len=prefix_len, text=prompt, temperature=temperature, cache_salt=salt,
    )  # fmt: skip
    if entries is not None:
        requests = generator.replay(entries, time_scale=time_scale, length_scale=length_scale)
    else:
        requests = generator.build_requests(num_requests or 10 * (concurrency or 1), rate=rate)
    # Another seed, so that the warm-up leaves no measured prompt in a cache.
    warm = RequestGenerator(model.vocab_size, seed=seed + 1, input_len=input_len, output_len=output_len).build_requests(
        warmup
    )
    open_loop = rate is not None or trace is not None
    report, samples = asyncio.run(
        _run(addresses, credentials, requests, warm, open_loop, concurrency, timeout, (slo_ttft_ms, slo_tpot_ms))
    )
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        Console().print(report_table(report))
    if plot is not None:
        plot_report(report, samples, plot)
        print(f"wrote {plot}", file=sys.stderr)
    if report.unfinished:
        raise typer.Exit(_EXIT_INTERRUPTED)
    if not report.succeeded:
        raise typer.Exit(1)


def _check_length(tokens: int, longest: int) -> None:
    """Raise InvalidConfig if the server would refuse every request."""
    if tokens > longest:
        raise InvalidConfig(
            f"a request would have {tokens:,} tokens, prompt and answer together, and the model takes {longest:,}; "
            "lower --input-len, --output-len or --prefix-len"
        )


async def _get_model(addresses: list[str], credentials: Credentials) -> pb.GetModelResponse:
    """The served model. Raise InvalidConfig if the routers serve different models; every router must answer."""
    answers = []
    for address in addresses:
        async with AsyncClient([address], credentials) as client:
            answers.append(await client.get_model(timeout=20.0))
    if len({answer.fingerprint for answer in answers}) > 1:
        raise InvalidConfig("the addresses serve different models; measure one at a time")
    return answers[0]


async def _run(
    addresses: list[str],
    credentials: Credentials,
    requests: list[BenchRequest],
    warm: list[BenchRequest],
    open_loop: bool,
    concurrency: int | None,
    timeout: float | None,
    objectives: tuple[float | None, float | None],
) -> tuple[Report, list[RequestSample]]:
    async with LoadGenerator(
        addresses, credentials, timeout=timeout, concurrency=concurrency or (len(requests) if open_loop else 1)
    ) as load:
        await load.run_closed_loop(warm, concurrency=len(addresses))
        _require_answers(load.recordings)
        load.recordings = []
        console = Console(stderr=True)
        # Drawn twice a second: the bar shares the cores with what is measured.
        bar = Progress(*_COLUMNS, console=console, refresh_per_second=2, disable=not console.is_terminal)
        task = bar.add_task("requests", total=len(requests))
        load.on_end = lambda: bar.advance(task)
        began, cpu = time.perf_counter(), time.process_time()
        if open_loop:
            run = asyncio.create_task(load.run_open_loop(requests, concurrency))
        else:
            run = asyncio.create_task(load.run_closed_loop(requests, concurrency or 1))
        # Ctrl-C ends the run; what was measured until then is reported.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.cancel)
        try:
            with bar:
                seconds = await run
        except asyncio.CancelledError:
            if not run.cancelled():
                raise
            seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        measured = [measure(recording) for recording in load.recordings if recording.status != INTERRUPTED]
    ttft, tpot = objectives
    unfinished = len(requests) - len(measured)
    report = summarize(
        measured,
        seconds,
        slo_ttft_ms=ttft,
        slo_tpot_ms=tpot,
        cpu_seconds=cpu,
        unfinished=unfinished,
        error_messages=_first_messages(load.recordings),
    )
    return report, [sample for sample in measured if isinstance(sample, RequestSample)]


def _first_messages(recordings: list[Recording]) -> dict[str, str]:
    """{status: the server's message for the first request with that status}, of requests that were not answered."""
    messages: dict[str, str] = {}
    for recording in recordings:
        if recording.details:
            messages.setdefault(recording.status, " ".join(recording.details.split()))
    return messages


def _require_answers(recordings: list[Recording]) -> None:
    """Raise the error of a warm-up request that failed, because the run would then measure only errors."""
    for recording in recordings:
        if recording.status != "OK":
            code = grpc.StatusCode[recording.status]
            outcome = "was not answered" if code is grpc.StatusCode.UNAVAILABLE else f"was refused ({recording.status})"
            raise error_of(code.value[0], f"the warm-up {outcome}: {recording.details}")
