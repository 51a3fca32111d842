"""Which addresses a router may listen on: beyond loopback only if clients need credentials, or with --insecure."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import is_loopback

if TYPE_CHECKING:
    from coatcheck.cluster.config.serve_config import ServeConfig


def check_exposure(config: "ServeConfig") -> None:
    """Raise InvalidConfig for incomplete TLS settings, or for an address beyond loopback without credentials."""
    if bool(config.tls_cert) != bool(config.tls_key):
        raise InvalidConfig("tls-cert and tls-key belong together; give both")
    if config.tls_client_ca and not config.tls_cert:
        raise InvalidConfig("tls-client-ca needs tls-cert and tls-key; give all three")
    if config.insecure or config.api_keys or config.tls_client_ca:
        return
    if open_to := _beyond_loopback(config):
        flag, host = open_to[0]
        raise InvalidConfig(
            f"{flag}-host is {host}, where anybody could send requests; give --api-keys FILE (`coatcheck keys new` "
            "makes one), or --tls-client-ca, or allow it with --insecure"
        )


def describe_exposure(config: "ServeConfig") -> str:
    """A one-line warning about access beyond loopback without credentials or TLS; "" if there is none."""
    beyond = _beyond_loopback(config)
    if not beyond:
        return ""
    if not (config.api_keys or config.tls_client_ca):
        return f"anybody who reaches {beyond[0][1]} can send requests and drain this cluster (--insecure)"
    if not config.tls_cert:
        return "keys and prompts are sent unencrypted; give --tls-cert and --tls-key, or use a proxy with TLS"
    return ""


def check_credentials(config: "ServeConfig") -> None:
    """Raise InvalidConfig for a key file or certificate that the router could not use.

    Skipped if `serve` joins a Ray cluster: the router may run on another host, with other files.
    """
    if config.ray_address is not None:
        return
    from coatcheck.router.access.key_file import read_keys
    from coatcheck.router.access.server_certificate import ServerCertificate

    if keys := absolute_path(config.api_keys):
        read_keys(keys)
    ServerCertificate.load(
        absolute_path(config.tls_cert), absolute_path(config.tls_key), absolute_path(config.tls_client_ca)
    )


def needs_cluster_certificates(config: "ServeConfig") -> bool:
    """Whether routers and groups authenticate each other.

    Needed if other hosts may run ranks or routers. Also needed if clients need credentials: otherwise a local user
    could call a group directly, without a key.
    """
    return config.ray_address is not None or bool(config.api_keys or config.tls_cert)


def absolute_path(path: str | None) -> str | None:
    """`path` made absolute, because a router has another working directory. None if `path` is empty."""
    return os.path.abspath(Path(path).expanduser()) if path else None


def _beyond_loopback(config: "ServeConfig") -> list[tuple[str, str]]:
    listeners = [("grpc", config.grpc_host)]
    if config.http_listen_port is not None:
        listeners.append(("http", config.http_host))
    return [(flag, host) for flag, host in listeners if not is_loopback(host)]
