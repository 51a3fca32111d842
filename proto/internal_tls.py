"""ClusterCertificate: the certificates with which routers and groups of one cluster authenticate each other.

A router's certificate is valid only for opening connections, a group's only for accepting them. Both are signed in
cluster/ray_cluster/cluster_ca.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

# Names in certificates. Groups move between hosts, so a certificate names the role instead of the host.
GROUP: Final = "group.coatcheck.internal"
ROUTER: Final = "router.coatcheck.internal"


@dataclass(frozen=True)
class ClusterCertificate:
    """A certificate and its private key, in PEM. `authority`: the certificate of the cluster's CA, the only CA that
    routers and groups trust."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)


def internal_channel(
    address: str, own: ClusterCertificate | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """A router's channel to a group: mutual TLS with the certificate `own`, or plaintext if `own` is None. The channel
    ignores the variable http_proxy: a proxy cannot reach a group's address, least of all 127.0.0.1."""
    direct = [*options, ("grpc.enable_http_proxy", 0)]
    if own is None:
        return grpc.aio.insecure_channel(address, options=direct)
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    named = [*direct, ("grpc.ssl_target_name_override", GROUP)]
    return grpc.aio.secure_channel(address, credentials, options=named)


def add_internal_port(server: grpc.aio.Server, address: str, own: ClusterCertificate | None) -> int:
    """Listen for routers at `address`: mutual TLS with the certificate `own`, or plaintext if it is None. Return the
    port."""
    if own is None:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], root_certificates=own.authority, require_client_auth=True
    )
    return server.add_secure_port(address, credentials)
