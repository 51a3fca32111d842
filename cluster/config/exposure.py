"""What a cluster shows to the network: nothing beyond loopback without credentials, unless it is asked for by name.

Pure but for reading the files that an operator names. It does not know how they are used.
"""

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING

from coatcheck.proto.errors import InvalidConfig

if TYPE_CHECKING:
    from coatcheck.cluster.config.serve_config import ServeConfig


def is_loopback(host: str) -> bool:
    """Whether only this host can connect there. A name that is not known here may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(config: "ServeConfig") -> None:
    """Raises InvalidConfig for a router that anybody could reach, and for half of a certificate."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise InvalidConfig("tls-cert and tls-key belong together; give both")
    if config.tls_client_ca and not config.tls_cert:
        raise InvalidConfig("tls-client-ca needs tls-cert and tls-key: clients show theirs to a server that has one")
    if config.insecure or config.api_keys or config.tls_client_ca:
        return
    if open_to := _beyond_loopback(config):
        flag, host = open_to[0]
        raise InvalidConfig(
            f"{flag}-host is {host}, where anybody could send requests; give --api-keys FILE (`coatcheck keys new` "
            "makes one), or --tls-client-ca, or ask for it with --insecure"
        )


def warn_of_exposure(config: "ServeConfig") -> str:
    """What an operator should know, in a line; empty when there is nothing."""
    beyond = _beyond_loopback(config)
    if not beyond:
        return ""
    if not (config.api_keys or config.tls_client_ca):
        return f"anybody who reaches {beyond[0][1]} can send requests and drain this cluster (--insecure)"
    if not config.tls_cert:
        return "keys and prompts cross the network in the clear; give --tls-cert and --tls-key, or have a proxy do it"
    return ""


def check_credentials(config: "ServeConfig") -> None:
    """Raises InvalidConfig for files that cannot be used, where the router will run on this host and read the same."""
    if config.ray_address is not None:
        return
    from coatcheck.router.access.key_file import read_keys
    from coatcheck.router.access.server_certificate import ServerCertificate

    if keys := absolute(config.api_keys):
        read_keys(keys)
    ServerCertificate.load(absolute(config.tls_cert), absolute(config.tls_key), absolute(config.tls_client_ca))


def needs_plane(config: "ServeConfig") -> bool:
    """Whether router and groups prove themselves to each other: wherever other hosts may take part, and wherever
    clients must, since a local user who went round the router would need no key."""
    return config.ray_address is not None or bool(config.api_keys or config.tls_cert)


def absolute(path: str | None) -> str | None:
    """As the router finds it, in another working directory."""
    return os.path.abspath(Path(path).expanduser()) if path else None


def _beyond_loopback(config: "ServeConfig") -> list[tuple[str, str]]:
    doors = [("grpc", config.grpc_host)]
    if config.http_listen_port is not None:
        doors.append(("http", config.http_host))
    return [(flag, host) for flag, host in doors if not is_loopback(host)]
