"""PlaneCertificate: what a router and a group of one cluster show each other, so that neither speaks to a stranger.

A certificate is good for one side alone: a router's only opens connections, a group's only takes them. It does not know
who signs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

# Groups come and go on any host, so their certificates name what they are and not where.
GROUP: Final = "group.coatcheck.internal"
ROUTER: Final = "router.coatcheck.internal"


@dataclass(frozen=True)
class PlaneCertificate:
    """In PEM. `authority` is the only one that this cluster believes."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)


def plane_channel(
    address: str, own: PlaneCertificate | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """To a group; mutual TLS, or plain without a certificate."""
    if own is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    named = [*options, ("grpc.ssl_target_name_override", GROUP)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def listen(server: grpc.aio.Server, address: str, own: PlaneCertificate | None) -> int:
    """Takes connections from routers; returns the port."""
    if own is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], root_certificates=own.authority, require_client_auth=True
    )
    return server.add_secure_port(address, credentials)
