"""HOST:PORT with IPv6 hosts, and which hosts are loopback."""

import socket

import pytest

from coatcheck.proto.host_port import bare_host, host_port, is_loopback, listen


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1:7"), ("a.b", "a.b:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), ("::", "[::]:7")],
)
def test_an_ipv6_host_stands_in_brackets(host: str, written: str) -> None:
    """With brackets or without, an IPv6 host is written with them in an address, and without them for a socket."""
    assert host_port(host, 7) == written
    assert bare_host(host) == host.strip("[]")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("router.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_what_loopback_is(host: str, loopback: bool) -> None:
    """An address that only this host reaches; a name may lead anywhere."""
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    ("host", "reached"),
    [("::1", "::1"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("[::]", "::1")],
)
def test_a_socket_listens_there(host: str, reached: str) -> None:
    """A socket of the host's family accepts connections; that of "::" accepts IPv4 too."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with listen(host, 0) as listener:
        socket.create_connection((reached, listener.getsockname()[1])).close()
