"""HOST:PORT with an IPv6 host in brackets, sockets that listen there, and which hosts are loopback."""

import ipaddress
import socket


def host_port(host: str, port: int) -> str:
    """HOST:PORT. `host`: a name, an IPv4 address, or an IPv6 address with brackets or without."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def bare_host(host: str) -> str:
    """`host` without the brackets of an IPv6 address, as sockets take it."""
    return host.removeprefix("[").removesuffix("]")


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address. A DNS name other than localhost may resolve to any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """A socket that listens at `host`, with "::" on IPv4 too; port 0: any free port. Raises OSError if the host cannot
    listen there."""
    bare = bare_host(host)
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    takes_both = bare == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((bare, port), family=family, backlog=backlog, dualstack_ipv6=takes_both)
