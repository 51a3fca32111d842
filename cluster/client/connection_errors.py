"""explain_error(): turns the status of a failed gRPC call into the error that a user should see."""

import re
from typing import Any

import grpc

from coatcheck.cluster.config.serve_config import DEFAULT_PORT
from coatcheck.proto.errors import CoatcheckError, Unavailable, error_of

# (phrases in gRPC's message for a call that reached no server, what to tell the user). The first entry with a phrase in
# the message is used. The message also contains "handshake" if a server ends or hangs during a handshake, so only
# OpenSSL's own reasons mean that a certificate is wrong.
_CONNECTIONS = (
    (
        ("failed parsing http/2", "alpn"),
        "{address} speaks HTTP, not gRPC: give the router's gRPC address, the first one in the line that begins with "
        f"`ready:` (port {DEFAULT_PORT} unless --grpc-port sets another)",
    ),
    (
        ("wrong_version_number",),
        "no TLS connection to {address}: the server there does not speak TLS; leave --tls-ca out, or give another "
        "address",
    ),
    (
        ("ssl_error", "not in peer certificate"),
        "no TLS connection to {address}: one side does not trust the other's certificate ({reason}); see --tls-ca, "
        "--tls-cert and --tls-key",
    ),
    (("connection refused",), "no server answers at {address}; is `coatcheck serve` running there?"),
    (
        ("timed out", "endpoint closing", "handshaker shutdown"),
        "{address} accepts the connection but does not answer: its router hangs, has just ended or is just "
        "starting, or another program listens there",
    ),
    (
        ("handshake read failed", "handshake write failed"),
        "{address} closed the connection during the handshake: its router has just ended or is just starting; try "
        "again",
    ),
    (
        ("socket closed", "connection reset", "broken pipe"),
        "{address} closes the connection at once: if it speaks TLS, give its authority with --tls-ca, and your "
        "certificate with --tls-cert if it asks for one; otherwise its router has just ended: try again",
    ),
    (("",), "no server answers at {address}; is `coatcheck serve` running there?"),
)
_NOT_CONNECTED = "failed to connect"  # part of gRPC's message for a call that was never sent
# gRPC's whole message for a call that was sent before its connection ended. The message depends on gRPC's version and
# on whether a read or a write failed first.
_CONNECTION_LOST = re.compile(
    r"stream removed.*|keepalive.*|goaway received.*|(client )?transport closed.*|endpoint closed.*"
    r"|((recv|send)msg: ?)?(socket closed|connection reset|connection timed out|broken pipe)( by peer)?( \(\d+\))?"
)
_OPENSSL_REASON = re.compile(r"OPENSSL_internal:(\w+)")
_OWN_DEADLINE = "Deadline Exceeded"  # gRPC's message on the client's side; a router that refuses early gives a reason


def explain_error(error: Any, address: str, timeout: float | None) -> CoatcheckError:
    """The error to show for a failed call to `address`. `error`: a grpc.RpcError that has a code."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE and (meaning := _explain_unavailable(details, address)):
        return Unavailable(meaning)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None and _OWN_DEADLINE in details:
        return CoatcheckError(f"gave up after {timeout:g} s")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        details += "; here it is taken from COATCHECK_API_KEY, or --api-key"
    return error_of(error.code().value[0], details)


def _explain_unavailable(details: str, address: str) -> str:
    """What to tell the user for an UNAVAILABLE call with gRPC's own message; "" if the message is the server's."""
    said = details.lower()
    if _CONNECTION_LOST.fullmatch(said):
        return f"the connection to {address} was lost: its router has ended or is being restarted"
    if _NOT_CONNECTED not in said:
        return ""
    meaning = next(meaning for phrases, meaning in _CONNECTIONS if any(phrase in said for phrase in phrases))
    reason = found[1] if (found := _OPENSSL_REASON.search(details)) else "its name does not match"
    return meaning.format(address=address, reason=reason)
