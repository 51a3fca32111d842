"""The edge: methods over messages become gRPC handlers over bytes, and errors become statuses with details.

Bytes are parsed here and not by gRPC, so that a message that does not parse is the client's error and not INTERNAL.
For gRPC every method takes a stream of messages, of which there is one: a method of one message would be called only
when all of it has come, and nothing that a stranger sends is to be kept.
This module does not know what the methods do.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Never, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]  # made by protoc
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # as above
from grpc_status import rpc_status

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, Overloaded, SlowReader, status_of
from coatcheck.proto.tracing import CARRIED
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.tenant import Scope, Tenant
from coatcheck.router.event_loop.message_limits import check_bytes, parse
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.serving.explanation import is_asked, trailing_metadata

_log = logging.getLogger(__name__)
# Parsing any shorter message takes less than 50 ms.
_LONG_BYTES: Final = 1 << 20
_MESSAGE_BYTES: Final = 1000  # sent twice, and once in an escaped form that may be three times as long

Context = grpc.aio.ServicerContext[bytes, bytes]
RequestIterator = AsyncIterator[bytes]
Question = TypeVar("Question", bound=Message)


class GrpcHandlers:
    """Makes gRPC handlers of methods. The gate admits the caller before any of its message is read.

    `knows`: the method also takes `tenant`. `generates`: it also takes `on_decision`, the `carrier` of the caller's
    trace, and `deadline`.
    """

    def __init__(self, gate: Authenticator, slow_reader_seconds: float, side: SideProcesses) -> None:
        self._gate = gate
        self._side = side
        self._slow_reader_seconds = slow_reader_seconds

    def unary(
        self,
        kind: type[Question],
        method: Callable[..., Awaitable[Message]],
        scope: Scope = "generate",
        *,
        knows: bool = False,
        generates: bool = False,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler for a method that answers once."""

        async def answer(messages: RequestIterator, context: Context) -> bytes:
            try:
                asked = _asked(context, self._admit(context, scope), knows, generates)
                return (await method(await self._message(kind, messages), **asked)).SerializeToString()
            except Exception as error:  # every request is answered, whatever went wrong
                await refuse(context, error)

        return grpc.stream_unary_rpc_method_handler(answer)

    def streaming(
        self,
        kind: type[Question],
        method: Callable[..., AsyncGenerator[Message, None]],
        scope: Scope = "generate",
        *,
        knows: bool = False,
        generates: bool = False,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler for a method that answers with a stream; a client that goes away closes the method's generator,
        and so does one that takes nothing for so long that it might as well have."""

        async def answer(messages: RequestIterator, context: Context) -> None:
            try:
                asked = _asked(context, self._admit(context, scope), knows, generates)
                async with aclosing(method(await self._message(kind, messages), **asked)) as events:
                    async for event in events:
                        await self._write(context, event)
            except Exception as error:  # as above
                await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _admit(self, context: Context, scope: Scope) -> Tenant:
        keys = (value for key, value in context.invocation_metadata() or () if key == "authorization")
        certificate = context.auth_context().get("x509_pem_cert", ()) if self._gate.asks else ()
        return self._gate.admit(
            next((key for key in keys if isinstance(key, str)), None), scope, certificate=next(iter(certificate), None)
        )

    async def _message(self, kind: type[Question], messages: RequestIterator) -> Question:
        """The call's one message. Raises InvalidRequest for bytes that are no `kind`, or have too many entries."""
        data = await _only_message(messages)
        if len(data) > _LONG_BYTES:
            await self._side.run(check_bytes, kind, data)
        return parse(kind, data)

    async def _write(self, context: Context, event: Message) -> None:
        try:
            async with asyncio.timeout(self._slow_reader_seconds):
                await context.write(event.SerializeToString())
        except TimeoutError:
            raise SlowReader(
                f"nothing was taken from this stream for {self._slow_reader_seconds:g} s; read it as it comes, or ask "
                "for less"
            ) from None


def _asked(context: Context, tenant: Tenant, knows: bool, generates: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"tenant": tenant} if knows else {}
    if not generates:
        return asked
    metadata = context.invocation_metadata() or ()
    if is_asked(metadata):
        asked["on_decision"] = lambda decision: context.set_trailing_metadata(trailing_metadata(decision))
    if (seconds := context.time_remaining()) is not None:
        asked["deadline"] = asyncio.get_running_loop().time() + seconds
    if carrier := {key: value for key, value in metadata if key in CARRIED and isinstance(value, str)}:
        asked["carrier"] = carrier
    return asked


async def _only_message(messages: RequestIterator) -> bytes:
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise InvalidRequest("the call ended without its message; send one") from None


def clip(text: str) -> str:
    """The text's first _MESSAGE_BYTES bytes: an error may quote input of any length; metadata is at most 8 KiB."""
    data = text[: _MESSAGE_BYTES + 1].encode()
    return text if len(data) <= _MESSAGE_BYTES else data[:_MESSAGE_BYTES].decode(errors="ignore") + "…"


async def refuse(context: Context, error: Exception) -> Never:
    """Ends the call with the error's status; what is not ours is logged, and the client gets a number to quote."""
    code, _ = status_of(error)
    if isinstance(error, CoatcheckError) and code != grpc.StatusCode.INTERNAL.value[0]:
        text = clip(str(error))
    else:
        incident = uuid.uuid4().hex[:12]
        _log.error("incident %s", incident, exc_info=error)
        text = f"something failed here that should not; the log has it as incident {incident}"
    status = Status(code=code, message=text)
    if isinstance(error, Overloaded):
        details = AnyMessage()
        details.Pack(RetryInfo(retry_delay=_duration(error.retry_seconds)))
        status.details.append(details)
    grpc_status = rpc_status.to_status(status)
    try:
        await context.abort(grpc_status.code, grpc_status.details, grpc_status.trailing_metadata)
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # the client has left before it was told, which is no news to anybody
        raise grpc.aio.AbortError from error
    raise AssertionError("abort always raises")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
