"""HOST:PORT addresses of routers, as users write them."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from coatcheck.cluster.config.serve_config import DEFAULT_PORT
from coatcheck.proto.errors import InvalidConfig

DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"  # a router on this host

# The --address of commands that call one router, and of those that take several.
RouterAddress = Annotated[str, typer.Option(help="The router, HOST:PORT.")]
RouterAddresses = Annotated[
    list[str] | None, typer.Option(help=f"A router, HOST:PORT; repeat for several. Default: {DEFAULT_ADDRESS}")
]

_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})")


def split_address(written: str, example: str = DEFAULT_ADDRESS) -> tuple[str, int]:
    """(host, port). An IPv6 host must be in brackets. Raise InvalidConfig with `example` for anything else."""
    if "://" in written:
        raise InvalidConfig(f"{written} has a scheme; write only HOST:PORT, such as {example}")
    match = _HOST_PORT.fullmatch(written)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise InvalidConfig(f"{written!r} is not HOST:PORT; write it like {example}")
    return match["host"], int(match["port"])


def check_addresses(given: Sequence[str] | None) -> list[str]:
    """The values of --address, or the default. Raise typer.BadParameter for one that is not HOST:PORT."""
    addresses = list(given or [DEFAULT_ADDRESS])
    for address in addresses:
        try:
            split_address(address)
        except InvalidConfig as error:
            raise typer.BadParameter(str(error), param_hint="--address") from None
    return addresses
