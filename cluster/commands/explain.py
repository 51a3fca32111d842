"""`coatcheck explain`: where a prompt would go now, and what each group would cost it. Nothing is sent to a group.

It does not know how a router decides.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from coatcheck.cluster.client.connection_errors import explain_error
from coatcheck.cluster.client.credentials import ApiKey, TlsCa, TlsCert, TlsKey, access_of
from coatcheck.cluster.client.request_builder import build_sampling
from coatcheck.cluster.commands.generate import put_prompt
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, check_addresses
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from rich.table import Table

_ASK_SECONDS = 60.0  # a long prompt takes its time to tokenise
# Columns of the table: seconds and tokens, by their names in GroupCost.
_SECONDS: Final = ("queue", "prefill", "restore", "decode", "eviction", "stall", "delay")
_TOKENS: Final = {"device_tokens": "cached", "host_tokens": "in host", "expected_tokens": "coming"}


def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Annotated[str, typer.Option(help="The router, HOST:PORT.")] = DEFAULT_ADDRESS,
    max_tokens: Annotated[
        int | None, typer.Option(help="As for `generate`: groups too small for it are left out.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message for the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it (with --chat).")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids: 1,2,3 or '1 2 3'.")] = False,
    cache_salt: Annotated[str, typer.Option(help="Prefixes are shared only under the same salt.")] = "",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which group would answer PROMPT and each group's cost in seconds, term by term; sends nothing."""
    request = pb.GenerateRequest(cache_salt=cache_salt, sampling=build_sampling({"max_tokens": max_tokens}))
    put_prompt(request, sys.stdin.read() if prompt == "-" else prompt, chat, system, token_ids)
    check_addresses([address])
    access = access_of(tls_ca, tls_cert, tls_key, api_key)
    with access.blocking_channel(address) as channel:
        try:
            stub = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
            told: pb.Explanation = stub.Explain(request, timeout=_ASK_SECONDS, metadata=access.metadata)
        except grpc.RpcError as error:
            raise explain_error(error, address, _ASK_SECONDS) from None
    if as_json:
        answer = MessageToDict(told, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        print(json.dumps(answer))
        return
    from rich.console import Console

    console = Console()
    console.print(told.why, highlight=False, soft_wrap=True)
    console.print(_table(told))


def _table(told: pb.Explanation) -> "Table":
    """A row for each group; terms that are nothing for all of them have no column."""
    from rich import box
    from rich.table import Table

    shown = {name: f"{name}_seconds" for name in _SECONDS}
    columns = {"cost": [f"{cost.total_seconds:.3f} s" for cost in told.costs]}
    columns |= {name: [f"{getattr(cost, field):.3f}" for cost in told.costs] for name, field in shown.items()}
    columns |= {name: [f"{getattr(cost, field):,}" for cost in told.costs] for field, name in _TOKENS.items()}
    columns = {name: cells for name, cells in columns.items() if name == "cost" or set(cells) - {"0", "0.000"}}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("group", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for cost, *cells in zip(told.costs, *columns.values(), strict=True):
        table.add_row(cost.group if cost.has_room else f"{cost.group} (full)", *cells)
    return table
