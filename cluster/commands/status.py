"""`coatcheck status` and `coatcheck drain`: a router's Admin service, for people and for scripts. Knows only gRPC."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from coatcheck.cluster.client.async_client import LONGEST_TIMEOUT
from coatcheck.cluster.client.connection_errors import explain_error
from coatcheck.cluster.client.credentials import ApiKey, Credentials, TlsCa, TlsCert, TlsKey, access_of
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, check_addresses
from coatcheck.cluster.plural import counted
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from rich.table import Table

_ASK_SECONDS = 10.0
_COLOURS = {"serving": "green", "draining": "yellow", "drained": "yellow", "starting": "yellow"}


def status(
    address: Annotated[str, typer.Option(help="The router, HOST:PORT.")] = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show groups, ranks, health, load, block occupancy, hit ratio, TTFT and TPOT."""
    access = access_of(tls_ca, tls_cert, tls_key, api_key)
    answer = ask_router(access, address, "Status", pb.StatusRequest(), _ASK_SECONDS)
    if as_json:
        print(json.dumps(as_json_object(answer)))
    else:
        _print(answer)


def drain(
    group: Annotated[str, typer.Argument(help="A group's name; default: the whole router.")] = "",
    address: Annotated[str, typer.Option(help="The router, HOST:PORT.")] = DEFAULT_ADDRESS,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, max=LONGEST_TIMEOUT, help="Seconds to wait for what runs; default: as long as it takes."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Send it new work again.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    api_key: ApiKey = None,
) -> None:
    """Send no new work to GROUP, or to the whole router, and wait until its running requests have ended.

    It stays so until `coatcheck drain [GROUP] --undo`. A drained router refuses every request. Exits with 1 if
    requests still run after --timeout.
    """
    if undo and timeout is not None:
        raise typer.BadParameter("--undo waits for nothing; leave --timeout out")
    access = access_of(tls_ca, tls_cert, tls_key, api_key)
    what = group or "the router"
    if undo:
        ask_router(access, address, "Drain", pb.DrainRequest(group=group, undo=True), _ASK_SECONDS)
        print(f"{what} takes new work again")
        return
    answer = ask_router(access, address, "Drain", pb.DrainRequest(group=group, timeout_seconds=0), _ASK_SECONDS)
    # Before the wait: whoever interrupts it should know that nothing is undone by that.
    again = " ".join(["coatcheck drain", *filter(None, [group]), "--undo"])
    print(f"{what} takes no new work until `{again}`", file=sys.stderr)
    if not answer.drained:
        answer = ask_router(access, address, "Drain", pb.DrainRequest(group=group, timeout_seconds=timeout), None)
    if answer.drained:
        print(f"{what} is drained")
        return
    running = counted(answer.remaining_streams, "stream")
    print(f"{what} is not drained: it has {running}, unless that was undone", file=sys.stderr)
    raise typer.Exit(1)


def ask_router(access: Credentials, address: str, method: str, request: Any, timeout: float | None) -> Any:
    """One call; raises the CoatcheckError of its failure."""
    check_addresses([address])
    with access.blocking_channel(address) as channel:
        try:
            stub = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
            return getattr(stub, method)(request, timeout=timeout, metadata=access.metadata)
        except grpc.RpcError as error:
            raise explain_error(error, address, timeout) from None


def as_json_object(answer: pb.StatusResponse) -> Any:
    """Every field, also those that are zero: scripts need not guess."""
    return _with_numbers(
        MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def colour_of(state: str) -> str:
    """As a person expects it."""
    return _COLOURS.get(state, "red")


def _with_numbers(value: Any) -> Any:
    """proto3's JSON writes 64-bit integers as strings; here they are numbers."""
    if isinstance(value, dict):
        return {key: item if key in _TEXTS else _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return int(value) if isinstance(value, str) and value.isdigit() else value


# Strings that may consist of digits.
_TEXTS = frozenset(
    {"name", "router", "node", "address", "reason", "fingerprint", "dtype", "kv_dtype", "state", "kernels", "version"}
)


def _print(answer: pb.StatusResponse) -> None:
    from rich.console import Console

    console = Console()
    model = answer.model
    console.print(
        f"{answer.router}: {_state(answer.state)}, model {model.name or '?'} "
        f"({model.dtype or '?'}, KV in {model.kv_dtype or '?'}), "
        f"{counted(answer.active_streams, 'stream')}, hit ratio {answer.hit_ratio:.1%}",
        highlight=False,
        soft_wrap=True,
    )
    for name, latency in (("TTFT", answer.ttft), ("TPOT", answer.tpot), ("ITL", answer.itl), ("queue", answer.queue)):
        if latency.count:
            p50, p90, p99 = (
                seconds * 1000 for seconds in (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
            )
            console.print(f"{name} p50 {p50:.1f} ms, p90 {p90:.1f}, p99 {p99:.1f} ({latency.count})", highlight=False)
    groups = _table("group", "state", "runs", "waits", "blocks used", "cached", "hits", "step", "restarts")
    for group in answer.groups:
        total = max(group.blocks_total, 1)
        cached_tokens = group.cached_device_tokens + group.cached_host_tokens
        groups.add_row(
            group.name,
            _state(group.state),
            str(group.running),
            str(group.waiting),
            f"{group.blocks_used}/{group.blocks_total}",
            f"{group.blocks_cached / total:.0%}",
            f"{cached_tokens / max(group.prompt_tokens, 1):.1%}",
            f"{group.step_seconds * 1000:.1f} ms",
            str(group.restarts),
        )
    console.print(groups)
    for group in answer.groups:
        if group.reason:
            console.print(f"{group.name}: {group.reason}", highlight=False, soft_wrap=True)
        if group.version != answer.version and group.version and answer.version:
            console.print(f"{group.name}: coatcheck {group.version}, the router {answer.version}", highlight=False)
    ranks = _table("rank", "healthy", "node", "pid", "steps", "peak memory")
    for group in answer.groups:
        for rank in group.ranks:
            ranks.add_row(
                f"{group.name}/{rank.rank}",
                "[green]yes[/]" if rank.healthy else "[red]no[/]",
                rank.node,
                str(rank.pid),
                str(rank.steps),
                f"{rank.peak_memory_bytes / 2**20:,.0f} MiB",
            )
    if ranks.row_count:
        console.print(ranks)


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _state(state: str) -> str:
    return f"[{colour_of(state)}]{state}[/]"
