"""`coatcheck status` and `coatcheck drain`: commands for a router's Admin service."""

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer
from google.protobuf.message import Message

from coatcheck.cluster.client.connection_errors import explain_error
from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.client.request_builder import LONGEST_TIMEOUT
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, RouterAddress, check_addresses
from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_CALL_SECONDS = 10.0
_MAX_RANK_ROWS = 256  # 8,000 rows would take a second to lay out
_COLOURS = {"serving": "green", "draining": "yellow", "drained": "yellow", "starting": "yellow"}


@with_credentials
def status(
    address: RouterAddress = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show groups, ranks, health, load, KV block usage, prefix cache hit ratio, TTFT and TPOT."""
    answer = call_admin(credentials, address, "Status", pb.StatusRequest(), _CALL_SECONDS)
    if as_json:
        print(json.dumps(as_json_object(answer)))
    else:
        _print(answer)


@with_credentials
def drain(
    group: Annotated[str, typer.Argument(help="The name of a group. Default: the whole router.")] = "",
    address: RouterAddress = DEFAULT_ADDRESS,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, max=LONGEST_TIMEOUT, help="Seconds to wait for running requests. Default: no limit."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Accept new requests again.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Drain GROUP, or the whole router: send no new requests there, and wait until the running ones have ended.

    Lasts until `coatcheck drain [GROUP] --undo`. A drained router refuses every request. Exits with 1 if requests
    still run after --timeout.
    """
    if undo and timeout is not None:
        raise typer.BadParameter("--undo waits for nothing; leave --timeout out")
    what = group or "the router"
    if undo:
        call_admin(credentials, address, "Drain", pb.DrainRequest(group=group, undo=True), _CALL_SECONDS)
        print(f"{what} takes new work again")
        return
    answer = call_admin(credentials, address, "Drain", pb.DrainRequest(group=group, timeout_seconds=0), _CALL_SECONDS)
    # Before the wait, because Ctrl-C ends only the wait and not the draining.
    again = " ".join(["coatcheck drain", *filter(None, [group]), "--undo"])
    print(f"{what} takes no new work until `{again}`", file=sys.stderr)
    if not answer.drained:
        answer = call_admin(credentials, address, "Drain", pb.DrainRequest(group=group, timeout_seconds=timeout), None)
    if answer.drained:
        print(f"{what} is drained")
        return
    running = counted(answer.remaining_streams, "stream")
    print(f"{what} is not drained: it has {running}, unless that was undone", file=sys.stderr)
    raise typer.Exit(1)


def call_admin(credentials: Credentials, address: str, method: str, request: Any, timeout: float | None) -> Any:
    """Call `method` of the router's Admin service. Raises a CoatcheckError if it fails."""
    check_addresses([address])
    with credentials.blocking_channel(address) as channel:
        try:
            stub = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
            return getattr(stub, method)(request, timeout=timeout, metadata=credentials.metadata)
        except grpc.RpcError as error:
            raise explain_error(error, address, timeout) from None


def as_json_object(message: Message) -> dict[str, Any]:
    """The fields of `message`, also zeros. 64-bit integers stay numbers; protobuf's own JSON makes them strings."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            value = getattr(message, field.name)
            found[field.name] = [_as_json(item) for item in value] if field.is_repeated else _as_json(value)
    return found


def _as_json(value: Any) -> Any:
    return as_json_object(value) if isinstance(value, Message) else value


def colour_of(state: str) -> str:
    """The terminal colour for the state of a group or router."""
    return _COLOURS.get(state, "red")


def describe_age(seconds: float) -> str:
    """A duration in one unit, rounded down: 42 s, 7 min, 3 h, 12 d; "-" for 0, which an older group reports."""
    if not seconds:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 1:.0f} s"


def _print(answer: pb.StatusResponse) -> None:
    from rich.console import Console

    console = Console()
    _print_router(console, answer)
    console.print(_group_table(answer.groups))
    for group in answer.groups:
        if group.reason:
            console.print(f"{group.name}: {group.reason}", highlight=False, soft_wrap=True)
        if group.version != answer.version and group.version and answer.version:
            console.print(f"{group.name}: coatcheck {group.version}, the router {answer.version}", highlight=False)
    _print_ranks(console, [(group.name, rank) for group in answer.groups for rank in group.ranks])


def _print_router(console: "Console", answer: pb.StatusResponse) -> None:
    """Print the router's model and settings, latencies, queue, and how its last requests ended."""
    model = answer.model
    console.print(
        f"{answer.router}: {_state(answer.state)}, model {model.name or '?'} "
        f"({model.dtype or '?'}, KV in {model.kv_dtype or '?'}{_latents(answer.groups)}), "
        f"routing {answer.routing or '?'}, {counted(answer.active_streams, 'stream')}, "
        f"hit ratio {answer.hit_ratio:.1%}",
        highlight=False,
        soft_wrap=True,
    )
    if adapters := [adapter.name for adapter in model.adapters]:
        console.print(f"LoRA adapters: {', '.join(adapters)}", highlight=False, soft_wrap=True, markup=False)
    if kernels := sorted({group.kernels for group in answer.groups if group.kernels}):
        console.print(f"kernels: {', '.join(kernels)}", highlight=False, soft_wrap=True)
    if busiest := _busiest_expert(answer.groups):
        console.print(busiest, highlight=False, soft_wrap=True)
    if answer.configuration:
        console.print(
            f"settings: {answer.configuration}", style="yellow", highlight=False, soft_wrap=True, markup=False
        )
    for name, latency in (("TTFT", answer.ttft), ("TPOT", answer.tpot), ("ITL", answer.itl), ("queue", answer.queue)):
        if latency.count:
            p50, p90, p99 = latency.p50_seconds * 1000, latency.p90_seconds * 1000, latency.p99_seconds * 1000
            console.print(f"{name} p50 {p50:.1f} ms, p90 {p90:.1f}, p99 {p99:.1f} ({latency.count})", highlight=False)
    if answer.queued_requests:
        waiting = counted(answer.queued_requests, "request")
        console.print(
            f"{waiting} in the router's queue, for up to {answer.queue_seconds:.1f} s", style="yellow", highlight=False
        )
    if answer.outcomes:
        ended = ", ".join(f"{one.count} {one.outcome}" for one in answer.outcomes)
        console.print(f"requests of the last 5 min: {ended}", highlight=False, soft_wrap=True)


def _group_table(groups: Iterable[pb.GroupStatus]) -> "Table":
    """A row for each group."""
    from rich.text import Text

    columns = ("group", "state", "runs", "waits", "blocks used", "cached", "hits", "step", "up", "restarts")
    table = make_table(*columns, left=["state"])
    rows = []
    for group in groups:
        cached_tokens = group.cached_device_tokens + group.cached_host_tokens
        cells = (
            group.name,
            Text(group.state, colour_of(group.state)),
            str(group.running),
            str(group.waiting),
            f"{group.blocks_used}/{group.blocks_total}",
            f"{group.blocks_cached / max(group.blocks_total, 1):.0%}",
            f"{cached_tokens / max(group.prompt_tokens, 1):.1%}",
            f"{group.step_seconds * 1000:.1f} ms",
            describe_age(group.uptime_seconds),
            str(group.restarts),
        )
        rows.append(cells)
    add_rows(table, rows)
    return table


def _print_ranks(console: "Console", ranks: "Sequence[tuple[str, pb.RankStatus]]") -> None:
    """Print a table of (name of the group, rank); only the unhealthy ones if there are more than _MAX_RANK_ROWS."""
    if len(ranks) > _MAX_RANK_ROWS:
        unhealthy = [(group, rank) for group, rank in ranks if not rank.healthy]
        console.print(
            f"{counted(len(ranks), 'rank')}, {len(unhealthy)} of them not healthy; `coatcheck status --json` lists all",
            highlight=False,
            soft_wrap=True,
        )
        ranks = unhealthy[:_MAX_RANK_ROWS]
    if ranks:
        console.print(_rank_table(ranks))


def _latents(groups: Iterable[pb.GroupStatus]) -> str:
    if any(group.divides_latents for group in groups):
        return ", latents divided over the ranks"
    return ", latents on every rank" if any(group.replicates_latents for group in groups) else ""


def _busiest_expert(groups: Iterable[pb.GroupStatus]) -> str:
    """How uneven the load of the experts is, over all groups; "" without counts."""
    totals = [
        sum(counts) for counts in zip(*(group.expert_tokens for group in groups if group.expert_tokens), strict=False)
    ]
    if not sum(totals):
        return ""
    busiest = max(range(len(totals)), key=totals.__getitem__)
    ratio = totals[busiest] * len(totals) / sum(totals)
    return f"experts: expert {busiest} of {len(totals)} is the busiest, with {ratio:.2f} times the mean of tokens"


def _rank_table(ranks: Iterable[tuple[str, pb.RankStatus]]) -> "Table":
    """A row for each (name of the group, rank)."""
    from rich.text import Text

    table = make_table("rank", "healthy", "node", "pid", "steps", "weights", "peak memory", left=["healthy", "node"])
    rows = [
        (
            f"{group}/{rank.rank}",
            Text("yes", "green") if rank.healthy else Text("no", "red"),
            rank.node,
            str(rank.pid),
            str(rank.steps),
            f"{rank.weight_bytes / 2**20:,.0f} MiB",
            f"{rank.peak_memory_bytes / 2**20:,.0f} MiB",
        )
        for group, rank in ranks
    ]
    add_rows(table, rows)
    return table


def make_table(*columns: str, left: Collection[str] = ()) -> "Table":
    """An empty table. The first column and those in `left` are aligned to the left, the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        is_left = name == columns[0] or name in left
        table.add_column(name, justify="left" if is_left else "right", no_wrap=True)
    return table


def add_rows(table: "Table", rows: "Sequence[Sequence[str | Text]]") -> None:
    """Add rows whose cells are of one line each. rich gets them as one row with a cell for each column, which takes a
    quarter of the time: 0.2 s for 1,000 groups."""
    from rich.text import Text

    if rows:
        columns = zip(*rows, strict=True)
        table.add_row(
            *(Text("\n").join(cell if isinstance(cell, Text) else Text(cell) for cell in column) for column in columns)
        )


def _state(state: str) -> str:
    return f"[{colour_of(state)}]{state}[/]"
