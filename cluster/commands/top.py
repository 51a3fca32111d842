"""`coatcheck top`: a router's groups, ranks, blocks, hits, queue and latency in a terminal, as they move.

It asks what `coatcheck status` asks, again and again; it does not know how a router counts.
"""

import json
import signal
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from coatcheck.cluster.client.credentials import ApiKey, TlsCa, TlsCert, TlsKey, access_of
from coatcheck.cluster.commands.status import as_json_object, ask_router, colour_of
from coatcheck.cluster.config.address import DEFAULT_ADDRESS
from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_ASK_SECONDS: Final = 10.0
_POINTS: Final = 60
_WIDEST_BAR, _NARROWEST_BAR, _BESIDE_BAR = 28, 6, 76  # cells
_STEPS: Final = " ▁▂▃▄▅▆▇█"


def top(
    address: Annotated[str, typer.Option(help="The router, HOST:PORT.")] = DEFAULT_ADDRESS,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one screen and end, its rate measured for --every.")
    ] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a look, one a line.")] = False,
) -> None:
    """Show groups, ranks, blocks by tier, hit ratio, queue, TTFT, TPOT and ITL, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    history = History()
    access = access_of(tls_ca, tls_cert, tls_key, api_key)

    def look() -> pb.StatusResponse:
        status: pb.StatusResponse = ask_router(access, address, "Status", pb.StatusRequest(), _ASK_SECONDS)
        history.add(status, time.monotonic())
        return status

    status = look()
    # Ctrl-C ends `top` with exit code 0 and restores the terminal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if as_json:
        with suppress(KeyboardInterrupt):
            print(json.dumps(as_json_object(status)), flush=True)
            while not once:
                time.sleep(every)
                print(json.dumps(as_json_object(look())), flush=True)
        return
    console = Console()
    if once or not console.is_terminal:
        time.sleep(every)  # a rate needs two looks
        status = look()
        console.print(screen(status, history, console.width))
        return
    with (
        suppress(KeyboardInterrupt),
        Live(screen(status, history, console.width), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(screen(status, history, console.width), refresh=True)
            time.sleep(every)
            status = look()


class History:
    """What is drawn over time: tokens a second between two looks, and how many wait."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=_POINTS)
        self.waiting: deque[float] = deque(maxlen=_POINTS)
        self._last: tuple[float, int] | None = None

    def add(self, status: pb.StatusResponse, now: float) -> None:
        """One look. A group that began anew counts from 0: the rate of that look is unknown, and shown as none."""
        tokens = sum(group.generated_tokens for group in status.groups)
        self.waiting.append(sum(group.waiting for group in status.groups))
        if self._last is not None and now > self._last[0]:
            self.rates.append(max(tokens - self._last[1], 0) / (now - self._last[0]))
        self._last = (now, tokens)


def screen(status: pb.StatusResponse, history: History, width: int) -> "RenderableType":
    """One look, drawn for so many columns."""
    from rich.console import Group

    cells = max(_NARROWEST_BAR, min(_WIDEST_BAR, width - _BESIDE_BAR))
    return Group(*_heading(status, history), _latencies(status), _groups(status, cells), *_reasons(status))


def _heading(status: pb.StatusResponse, history: History) -> "list[RenderableType]":
    from rich.text import Text

    running, waiting = (sum(getattr(group, name) for group in status.groups) for name in ("running", "waiting"))
    model = status.model
    first = Text.assemble(
        ("coatcheck ", "bold"), f"{status.router}  ", (status.state, colour_of(status.state)),
        f"  {model.name or 'no model yet'} ({model.dtype or '?'}, KV in {model.kv_dtype or '?'})",
    )  # fmt: skip
    rate = f"{history.rates[-1]:,.0f}" if history.rates else "?"
    second = Text.assemble(
        (rate, "bold"), " tokens/s ", (spark(history.rates), "cyan"), "  ",
        (f"{running:,}", "bold"), " run, ", (f"{waiting:,}", "bold"), " wait ", (spark(history.waiting), "yellow"),
        "  ", counted(status.active_streams, "request"), " open, ", (f"{status.hit_ratio:.1%}", "bold"), " hits",
    )  # fmt: skip
    return [first, second]


def _latencies(status: pb.StatusResponse) -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("", "p50", "p90", "p99", "samples"):
        table.add_column(name, justify="left" if not name else "right")
    for name, latency in (("TTFT", status.ttft), ("TPOT", status.tpot), ("ITL", status.itl), ("queue", status.queue)):
        seconds = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
        cells = [f"{value * 1000:,.1f} ms" for value in seconds] if latency.count else ["-"] * 3
        table.add_row(name, *cells, f"{latency.count:,}")
    return table


def _groups(status: pb.StatusResponse, cells: int) -> "RenderableType":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    for name in ("runs", "waits", "hits", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks: used, cached, free", no_wrap=True)
    for group in status.groups:
        found = group.cached_device_tokens + group.cached_host_tokens
        tiers = Text.assemble("device ", bar(group.blocks_used, group.blocks_cached, group.blocks_total, cells))
        if group.host_blocks_total:
            tiers.append_text(
                Text.assemble("\nhost   ", bar(0, group.host_blocks_used, group.host_blocks_total, cells))
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
    from rich.text import Text

    return [Text(f"{group.name}: {group.reason}", "red") for group in status.groups if group.reason]


def bar(used: int, cached: int, total: int, width: int) -> "Text":
    """Of a tier's blocks, drawn to scale in so many cells; what is there at all gets a cell."""
    from rich.text import Text

    if not total:
        return Text("off")
    cells = [min(width, -(-count * width // total)) for count in (used, cached)]
    cells[1] = min(cells[1], width - cells[0])
    return Text.assemble(
        ("█" * cells[0], "blue"), ("█" * cells[1], "green"), ("░" * (width - sum(cells)), "bright_black"),
        f" {used + cached:,}/{total:,}",
    )  # fmt: skip


def spark(values: deque[float]) -> str:
    """A line of little bars, to the scale of the highest."""
    most = max(values, default=0.0)
    return "".join(_STEPS[round(value / most * (len(_STEPS) - 1))] if most else _STEPS[0] for value in values)
