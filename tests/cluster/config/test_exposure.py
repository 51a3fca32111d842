"""Where a cluster may listen, and what it needs for that."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.config.derived_config import group_config, router_config
from coatcheck.cluster.config.exposure import (
    check_credentials,
    describe_exposure,
    needs_cluster_certificates,
)
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.cluster_ca import sign_certificates
from coatcheck.proto.errors import InvalidConfig

_TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize("listener", [{"grpc_host": "0.0.0.0"}, {"http_host": "::"}])
@pytest.mark.parametrize("given", [{}, _TLS])
def test_nothing_listens_beyond_loopback_for_everybody(listener: dict[str, Any], given: dict[str, Any]) -> None:
    """Without credentials for clients it is refused, with what to give; TLS alone keeps nobody out."""
    with pytest.raises(InvalidConfig, match=r"-host is \S+, where anybody .*--api-keys .*--tls-client-ca.*--insecure"):
        ServeConfig.build({"model": "m"} | listener | given)


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"insecure": True}, "anybody who reaches 0.0.0.0"),
        ({"api_keys": "keys.yaml"}, "unencrypted"),
        ({"api_keys": "keys.yaml", **_TLS}, ""),
        ({"tls_client_ca": "ca", **_TLS}, ""),
    ],
)
def test_what_may_listen_there(given: dict[str, Any], warning: str) -> None:
    """Keys or certificates of clients, or the word itself; what is lost by it is said in a line."""
    config = ServeConfig.build({"model": "m", "grpc_host": "0.0.0.0", **given})
    said = describe_exposure(config)
    assert warning in said and bool(said) == bool(warning)


def test_a_door_that_is_not_there_needs_no_key() -> None:
    """HTTP that is off may be said to listen anywhere."""
    ServeConfig.build({"model": "m", "http_host": "0.0.0.0", "http_port": "none"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls_cert": "c"}, "tls-cert and tls-key belong together"),
        ({"tls_key": "k"}, "tls-cert and tls-key belong together"),
        ({"tls_client_ca": "ca"}, "tls-client-ca needs tls-cert"),
    ],
)
def test_half_of_a_certificate(given: dict[str, Any], said: str) -> None:
    """Is refused with what is missing."""
    with pytest.raises(InvalidConfig, match=said):
        ServeConfig.build({"model": "m", **given})


def test_files_are_read_before_anything_starts(tmp_path: Path) -> None:
    """On this host, where the router will find the same; on another cluster only the router can tell."""
    given = {"model": "m", "api_keys": str(tmp_path / "none.yaml")}
    with pytest.raises(InvalidConfig, match=r"none\.yaml: No such file"):
        check_credentials(ServeConfig.build(given))
    check_credentials(ServeConfig.build(given | {"ray_address": "10.0.0.1:6379"}))


@pytest.mark.parametrize(
    ("given", "proven"),
    [({}, False), ({"api_keys": "k"}, True), (_TLS, True), ({"ray_address": "10.0.0.1:6379"}, True)],
)
def test_when_routers_and_groups_prove_themselves(given: dict[str, Any], proven: bool) -> None:
    """Wherever other hosts may take part, and wherever clients have to."""
    assert needs_cluster_certificates(ServeConfig.build({"model": "m", **given})) == proven


def test_no_secret_in_what_is_shown() -> None:
    """What may reach a log, a configuration's own words, has no private key in it."""
    config, certificates = ServeConfig.build({"model": "m", "api_keys": "keys.yaml"}), sign_certificates()
    shown = [
        repr(certificates),
        repr(router_config(config, "router-0", 0, certificates.router, b"PRIVATE")),
        repr(group_config(config, "g", "cpu", certificates.group)),
    ]
    assert all("PRIVATE" not in text and "CERTIFICATE" not in text for text in shown)


def test_files_are_found_from_elsewhere(tmp_path: Path) -> None:
    """A router runs in another directory than the command."""
    config = ServeConfig.build({"model": "m", "api_keys": "keys.yaml", "tls_cert": "c", "tls_key": "~/k"})
    with chdir(tmp_path):
        made = router_config(config, "router-0", 0)
    assert made.key_file == str(tmp_path / "keys.yaml") and made.tls_key == str(Path.home() / "k")
