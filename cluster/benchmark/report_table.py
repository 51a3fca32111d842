"""report_table: a Report as a table for a terminal."""

from dataclasses import astuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from coatcheck.cluster.benchmark.report import LatencyPercentiles, Report
from coatcheck.cluster.plural import counted

# With messages at an even pace the two medians differ by less than this factor.
_BUNCHED = 4.0

ROWS = (
    ("TTFT, time to the first token", "ttft_ms"),
    ("TPOT, time per further token", "tpot_ms"),
    ("ITL, gap between messages", "itl_ms"),
    ("E2E, whole answer", "e2e_ms"),
)


def report_table(report: Report) -> Group:
    """Latencies as a table, other figures as lines below."""
    table = Table(title_justify="left")
    table.add_column("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for title, attribute in ROWS:
        latency: LatencyPercentiles | None = getattr(report, attribute)
        if latency is not None:
            table.add_row(title, *(f"{value:.1f}" for value in astuple(latency)))
    return Group(table, *(Text(line) for line in _lines(report)))


def _lines(report: Report) -> list[str]:
    lines = [
        f"{report.succeeded} of {report.requests} requests answered in {report.seconds:.1f} s "
        f"({report.success_rate:.1%}), {report.requests_per_second:.2f} requests/s",
        f"{report.output_tokens_per_second:.1f} output tokens/s, {report.total_tokens_per_second:.1f} tokens/s in all",
    ]
    if report.prompt_tokens:
        device, host = (
            cached / report.prompt_tokens for cached in (report.cached_device_tokens, report.cached_host_tokens)
        )
        lines.append(f"prompt tokens cached: {device:.1%} on the device, {host:.1%} in host memory")
    if report.goodput is not None and report.within_slo is not None:
        lines.append(f"goodput {report.goodput:.2f} requests/s ({report.within_slo:.1%} within the objectives)")
    if len(report.groups) > 1:
        lines.append("requests per group: " + ", ".join(f"{name} {n}" for name, n in sorted(report.groups.items())))
    if report.unfinished:
        lines.append(f"interrupted: {counted(report.unfinished, 'request')} had not ended and do not count")
    if report.errors:
        lines.append("not answered: " + ", ".join(f"{name} {n}" for name, n in sorted(report.errors.items())))
        lines += [f"first {name}: {message}" for name, message in sorted(report.error_messages.items())]
    tpot, itl = report.tpot_ms, report.itl_ms
    if tpot is not None and itl is not None and itl.p50 * _BUNCHED < tpot.p50:
        lines.append(
            "note: the p50 of ITL is far below that of TPOT, because messages arrived in bunches, as on a busy client; "
            "compare TPOT"
        )
    lines.append(f"the client's own CPU: {report.client_cpu_us_per_token:.0f} µs a token")
    return lines
