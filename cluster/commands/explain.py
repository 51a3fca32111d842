"""`coatcheck explain`: prints which group a router would choose for a prompt, and what every group would cost."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.client.request_builder import build_sampling
from coatcheck.cluster.commands.generate import put_prompt
from coatcheck.cluster.commands.status import as_json_object, call_admin, make_table
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, RouterAddress
from coatcheck.proto.stubs import coatcheck_pb2 as pb

if TYPE_CHECKING:
    from rich.table import Table

_CALL_SECONDS = 60.0  # the router tokenizes the prompt, which may be long
# Columns of the table: cost terms in seconds, and numbers of tokens, by their fields in GroupCost.
_SECONDS: Final = ("queue", "prefill", "restore", "decode", "eviction", "stall", "delay")
_TOKENS: Final = {"device_tokens": "cached", "host_tokens": "in host", "expected_tokens": "expected"}


@with_credentials
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: RouterAddress = DEFAULT_ADDRESS,
    max_tokens: Annotated[
        int | None, typer.Option(help="As for `generate`. Groups without room for prompt and answer are left out.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message for the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before PROMPT; needs --chat.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids: 1,2,3 or '1 2 3'.")] = False,
    cache_salt: Annotated[str, typer.Option(help="Requests share cached prefixes only if their salts are equal.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Show which group would get PROMPT, and every group's cost in seconds, term by term. Sends no request."""
    request = pb.GenerateRequest(cache_salt=cache_salt, sampling=build_sampling({"max_tokens": max_tokens}))
    put_prompt(request, sys.stdin.read() if prompt == "-" else prompt, chat, system, token_ids)
    explanation: pb.Explanation = call_admin(credentials, address, "Explain", request, _CALL_SECONDS)
    if as_json:
        print(json.dumps(as_json_object(explanation)))
        return
    from rich.console import Console

    console = Console()
    console.print(explanation.why, highlight=False, soft_wrap=True)
    console.print(_cost_table(explanation.costs))


def _cost_table(costs: Sequence[pb.GroupCost]) -> "Table":
    """A row for each group. Terms that are zero for all groups have no column; nor has `refused` if no group is."""
    columns = {"cost": [f"{cost.total_seconds:.3f} s" for cost in costs]}
    columns |= {name: [f"{getattr(cost, f'{name}_seconds'):.3f}" for cost in costs] for name in _SECONDS}
    columns |= {name: [f"{getattr(cost, field):,}" for cost in costs] for field, name in _TOKENS.items()}
    columns["refused"] = [cost.refused for cost in costs]
    columns = {name: cells for name, cells in columns.items() if name == "cost" or set(cells) - {"0", "0.000", ""}}
    table = make_table("group", *columns)
    for cost, *cells in zip(costs, *columns.values(), strict=True):
        table.add_row(cost.group if cost.has_room else f"{cost.group} (no room)", *cells)
    return table
