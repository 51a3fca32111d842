"""AsyncClient: our own client of the public service. A stream that loses its router goes on by itself at another.

It needs nothing from the router that was lost: a resume is the request again with the seed from Started and the token
ids that have come so far. It does not know groups or engines, and it prints nothing.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc

from coatcheck.cluster.client.credentials import Credentials
from coatcheck.cluster.client.resume_state import ResumeState
from coatcheck.cluster.config.serve_config import DEFAULT_PORT
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import CoatcheckError, Unavailable, error_of
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub

LONGEST_TIMEOUT = 365 * 86_400.0  # seconds; gRPC treats a deadline much further away as one in the past

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A router that comes back should be found at once, not after gRPC's usual minutes of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is also the time limit of one attempt to connect; TLS to a far or busy host takes seconds.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# (phrases in gRPC's message for a call that reached no server, what to tell the user). The first entry of which a
# phrase occurs is taken. A server that ends or hangs during a handshake puts "handshake" into the message too, so only
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
# gRPC's whole message for a call that was sent before its connection ended.
_CONNECTION_LOST = re.compile(
    r"(stream removed \()?((recv|send)msg:)?(socket closed|connection reset by peer|broken pipe)( \(\d+\))?\)?"
)
_OPENSSL_REASON = re.compile(r"OPENSSL_internal:(\w+)")
_OWN_DEADLINE = "Deadline Exceeded"  # gRPC's message on the client's side; a router that refuses early gives a reason


class AsyncClient:
    """Speaks to any of several routers of one cluster; an async context manager that owns its channels.

    `max_resumes` bounds how often one stream moves without having got an event in between, `patience` for how many
    seconds in a row it looks for a router.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        access: Credentials | None = None,
        *,
        max_resumes: int = 128,
        patience: float = 120.0,
    ) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address, host:port")
        self._addresses = tuple(addresses)
        self._access = access or Credentials()
        self._max_resumes = max_resumes
        self._patience = patience
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every channel and the streams on them."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def stream_events(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncIterator[pb.GenerateEvent]:
        """One Started, Deltas without gap or repeat, one Final, over however many routers it takes.

        Raises the CoatcheckError of the status with which a router refuses, and Unavailable when none is left.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        delivered = ResumeState(request)
        losses = 0
        lost_since = 0.0
        while True:
            try:
                async for event in self._attempt(delivered.request(), deadline):
                    if (new := delivered.take(event)) is not None:
                        losses = 0
                        yield new
                if delivered.complete:
                    return
                loss: CoatcheckError = Unavailable(f"{self.address} ended the stream before its end")
            except grpc.aio.AioRpcError as error:
                loss = explain_error(error, self.address, timeout)
                if not _may_go_on(error.code(), delivered.started):
                    raise loss from None
            losses += 1
            if losses == 1:
                lost_since = time.monotonic()
            # Before the first event every router is asked once; a stream that had begun is worth waiting for.
            budget = self._max_resumes if delivered.started else len(self._addresses) - 1
            if losses > budget or time.monotonic() - lost_since > self._patience:
                if delivered.started:
                    raise Unavailable(f"lost the router after {counted(delivered.num_tokens, 'token')}: {loss}")
                raise loss
            self._current += 1
            if losses >= len(self._addresses):
                await asyncio.sleep(min(0.05 * 2 ** min(losses, 5), self._patience))

    async def get_model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        """What `address` serves; raises the CoatcheckError of its refusal."""
        stub = GenerationStub(self.channel())  # type: ignore[no-untyped-call]  # made by protoc
        try:
            model: pb.GetModelResponse = await stub.GetModel(
                pb.GetModelRequest(), timeout=timeout, metadata=self._access.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise explain_error(error, self.address, timeout) from None
        return model

    @property
    def address(self) -> str:
        """The router that is asked next, or that was asked last."""
        return self._addresses[self._current % len(self._addresses)]

    def channel(self) -> grpc.aio.Channel:
        """The channel to `address`, opened when first needed."""
        if self.address not in self._channels:
            self._channels[self.address] = self._access.channel(self.address, OPTIONS)
        return self._channels[self.address]

    async def _attempt(self, request: pb.GenerateRequest, deadline: float | None) -> AsyncIterator[pb.GenerateEvent]:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        stub: Any = GenerationStub(self.channel())  # type: ignore[no-untyped-call]  # made by protoc
        call = stub.GenerateStream(request, timeout=timeout, metadata=self._access.metadata)
        try:
            async for event in call:
                yield event
        finally:
            # A caller that leaves early must not leave a sequence running.
            call.cancel()


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


def _may_go_on(code: grpc.StatusCode, started: bool) -> bool:
    """Whether another router may answer what this one did not. A begun stream outwaits a full router as well."""
    return code is grpc.StatusCode.UNAVAILABLE or (started and code is grpc.StatusCode.RESOURCE_EXHAUSTED)
