"""`coatcheck top`: shows the status of a router in a terminal, and updates it until Ctrl-C."""

import json
import signal
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.commands.status import as_json_object, call_admin, colour_of, describe_age, make_table
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, RouterAddress
from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_CALL_SECONDS: Final = 10.0
_POINTS: Final = 60  # in a sparkline
_MAX_BAR: Final = 28  # columns of a bar
_TITLED_BAR: Final = 14  # beside a shorter bar the title that explains its colours has no room
_SHORT_WAIT: Final = 0.1  # seconds in the router's queue that are not worth a line
_STEPS: Final = " ▁▂▃▄▅▆▇█"


@with_credentials
def top(
    address: RouterAddress = DEFAULT_ADDRESS,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and exit; the token rate is measured over --every seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each update, one a line.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show groups, ranks, KV blocks by tier, prefix cache hit ratio, queue, TTFT, TPOT and ITL, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    history = History()

    def read_status() -> pb.StatusResponse:
        status: pb.StatusResponse = call_admin(credentials, address, "Status", pb.StatusRequest(), _CALL_SECONDS)
        history.add_sample(status, time.monotonic())
        return status

    status = read_status()
    # Ctrl-C ends `top` with exit code 0 and restores the terminal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if as_json:
        with suppress(KeyboardInterrupt):
            print(json.dumps(as_json_object(status)), flush=True)
            while not once:
                time.sleep(every)
                print(json.dumps(as_json_object(read_status())), flush=True)
        return
    console = Console()
    if once or not console.is_terminal:
        time.sleep(every)  # a rate needs two samples
        status = read_status()
        console.print(screen(status, history, console.width))
        return
    with (
        suppress(KeyboardInterrupt),
        Live(screen(status, history, console.width), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(screen(status, history, console.width), refresh=True)
            time.sleep(every)
            status = read_status()


class History:
    """The last 60 samples of the sparklines: generated tokens per second, and waiting requests."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=_POINTS)
        self.waiting: deque[float] = deque(maxlen=_POINTS)
        self._last: tuple[float, int] | None = None

    def add_sample(self, status: pb.StatusResponse, now: float) -> None:
        """Add the sample of time `now`. After a group restarts, its token count starts at 0, and one rate is 0."""
        tokens = sum(group.generated_tokens for group in status.groups)
        self.waiting.append(count_waiting(status))
        if self._last is not None and now > self._last[0]:
            self.rates.append(max(tokens - self._last[1], 0) / (now - self._last[0]))
        self._last = (now, tokens)


def count_waiting(status: pb.StatusResponse) -> int:
    """Requests that wait in the router, and sequences that wait in groups."""
    return status.queued_requests + sum(group.waiting for group in status.groups)


def screen(status: pb.StatusResponse, history: History, width: int) -> "RenderableType":
    """The whole screen, for a terminal of `width` columns."""
    from rich.console import Console, Group

    beside_bar = Console(width=1000).measure(_groups(status, 0)).maximum
    cells = max(0, min(_MAX_BAR, width - beside_bar))
    return Group(*_heading(status, history, width), _latencies(status), _groups(status, cells), *_reasons(status))


def _heading(status: pb.StatusResponse, history: History, width: int) -> "list[RenderableType]":
    from rich.text import Text

    model = status.model
    first = Text.assemble(
        ("coatcheck ", "bold"), f"{status.router}  ", (status.state, colour_of(status.state)),
        f"  {model.name or 'no model yet'} ({model.dtype or '?'}, KV in {model.kv_dtype or '?'})",
    )  # fmt: skip
    points = max(0, width - _load(status, history, 0).cell_len) // 2  # for each of two sparklines
    settings = [Text(f"settings: {status.configuration}", "yellow")] if status.configuration else []
    return [first, *settings, _load(status, history, points), _outcomes(status)]


def _load(status: pb.StatusResponse, history: History, points: int) -> "Text":
    """The line of rates and queues, with the newest `points` samples in each sparkline."""
    from rich.text import Text

    running = sum(group.running for group in status.groups)
    rate = f"{history.rates[-1]:,.0f}" if history.rates else "?"
    return Text.assemble(
        (rate, "bold"), " tokens/s ", (draw_sparkline(history.rates, points), "cyan"),
        "  ", (f"{running:,}", "bold"), " run, ",
        (f"{count_waiting(status):,}", "bold"), " wait ", (draw_sparkline(history.waiting, points), "yellow"),
        "  ", counted(status.active_streams, "request"), " open, ", (f"{status.hit_ratio:.1%}", "bold"), " hits",
    )  # fmt: skip


def _outcomes(status: pb.StatusResponse) -> "Text":
    """How many groups serve, how requests ended, and how long they wait."""
    from rich.text import Text

    ended = ", ".join(f"{one.count:,} {one.outcome}" for one in status.outcomes) or "none"
    waits = f"; requests wait for up to {status.queue_seconds:.1f} s" if status.queue_seconds >= _SHORT_WAIT else ""
    serving = sum(group.state == "serving" for group in status.groups)
    groups = f"{serving} of {counted(len(status.groups), 'group')} serving"
    return Text(f"{groups}; requests of the last 5 min: {ended}{waits}")


def _latencies(status: pb.StatusResponse) -> "RenderableType":
    table = make_table("", "p50", "p90", "p99", "samples")
    for name, latency in (("TTFT", status.ttft), ("TPOT", status.tpot), ("ITL", status.itl), ("queue", status.queue)):
        seconds = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
        cells = [f"{value * 1000:,.1f} ms" for value in seconds] if latency.count else ["-"] * 3
        table.add_row(name, *cells, f"{latency.count:,}")
    return table


def _groups(status: pb.StatusResponse, cells: int) -> "RenderableType":
    from rich.text import Text

    left = ("state", "ranks", "blocks: used, cached, free" if cells >= _TITLED_BAR else "blocks")
    table = make_table("group", *left[:2], "runs", "waits", "hits", "step", left[2], left=left)
    for group in status.groups:
        found = group.cached_device_tokens + group.cached_host_tokens
        tiers = Text.assemble("device ", draw_bar(group.blocks_used, group.blocks_cached, group.blocks_total, cells))
        if group.host_blocks_total:
            tiers.append_text(
                Text.assemble("\nhost   ", draw_bar(0, group.host_blocks_used, group.host_blocks_total, cells))
            )
        ranks = Text.assemble(
            *[("●" if rank.healthy else "✕", "green" if rank.healthy else "red") for rank in group.ranks]
        )
        table.add_row(
            Text(group.name),
            Text(group.state, colour_of(group.state)),
            ranks,
            f"{group.running:,}",
            f"{group.waiting:,}",
            f"{found / max(group.prompt_tokens, 1):.1%}",
            f"{group.step_seconds * 1000:.1f} ms",
            tiers,
        )
    return table


def _reasons(status: pb.StatusResponse) -> "list[RenderableType]":
    """A line for each group that does not serve or was started again: how often, how long ago, and why."""
    from rich.text import Text

    lines: list[RenderableType] = []
    for group in status.groups:
        parts = [counted(group.restarts, "restart")] if group.restarts else []
        if group.restarts and group.uptime_seconds:
            parts.append(f"the last {describe_age(group.uptime_seconds)} ago")
        if group.reason:
            parts.append(group.reason)
        if parts:
            lines.append(Text(f"{group.name}: {', '.join(parts)}", "red" if group.reason else "yellow"))
    return lines


def draw_bar(used: int, cached: int, total: int, width: int) -> "Text":
    """The blocks of one tier, drawn to scale in `width` cells. A number above zero gets at least one cell."""
    from rich.text import Text

    if not total:
        return Text("off")
    cells = [min(width, -(-count * width // total)) for count in (used, cached)]
    cells[1] = min(cells[1], width - cells[0])
    return Text.assemble(
        ("█" * cells[0], "blue"), ("█" * cells[1], "green"), ("░" * (width - sum(cells)), "bright_black"),
        f" {used + cached:,}/{total:,}",
    )  # fmt: skip


def draw_sparkline(values: deque[float], points: int) -> str:
    """A sparkline of the last `points` values, scaled to the highest value."""
    shown = list(values)[max(0, len(values) - points) :]
    most = max(shown, default=0.0)
    return "".join(_STEPS[round(value / most * (len(_STEPS) - 1))] if most else _STEPS[0] for value in shown)
