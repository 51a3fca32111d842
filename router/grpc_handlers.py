"""GrpcHandlers: the methods of the public gRPC services, from the bytes of a call to its response or its status.

A call passes four steps: its caller is authenticated, its message is read, the method of the service runs, and what the
method returns or raises is sent.

Every method is registered as client-streaming, reads exactly one message, and parses the bytes itself. With a unary
registration gRPC would receive the whole message before the caller is authenticated, and would respond INTERNAL to
bytes that do not parse, although they are the client's error.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Never, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from coatcheck.proto.errors import InvalidRequest, SlowReader
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.tracing import TRACE_CONTEXT_HEADERS
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.tenant import Scope, Tenant
from coatcheck.router.config import MESSAGE_BYTES
from coatcheck.router.event_loop.message_limits import check_bytes, parse_message
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.errors import grpc_status, report_error
from coatcheck.router.serving.admin_service import AdminService
from coatcheck.router.serving.embed_service import EmbedService
from coatcheck.router.serving.explanation import trailing_metadata, wants_explanation
from coatcheck.router.serving.generate_service import CallOptions, GenerateService

GENERATION_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Generation"].full_name
ADMIN_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Admin"].full_name
# A longer message is checked in a side process first. Parsing a shorter one takes less than 50 ms.
_LONG_MESSAGE_BYTES: Final = 1 << 20

Context = grpc.aio.ServicerContext[bytes, bytes]
RequestIterator = AsyncIterator[bytes]
RequestMessage = TypeVar("RequestMessage", bound=Message)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class GrpcHandlers:
    """The handlers of the services Generation and Admin."""

    def __init__(
        self,
        generation: GenerateService,
        embedding: EmbedService,
        admin: AdminService,
        authenticator: Authenticator,
        side: SideProcesses,
        slow_reader_seconds: float,
    ) -> None:
        """`side` checks long messages. A client that reads nothing for `slow_reader_seconds` loses its stream."""
        self._generation = generation
        self._embedding = embedding
        self._admin = admin
        self._authenticator = authenticator
        self._side = side
        self._slow_reader_seconds = slow_reader_seconds

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers all methods. The last argument of `_unary` and `_streaming` is the scope that a caller needs."""
        generation, admin = self._generation, self._admin
        generation_methods = {
            "Generate": self._unary(
                pb.GenerateRequest, lambda message, call: generation.generate(message, call.options()), "generate"
            ),
            "GenerateStream": self._streaming(
                pb.GenerateRequest,
                lambda message, call: generation.generate_stream(message, call.options()),
                "generate",
            ),
            "Embed": self._unary(
                pb.EmbedRequest, lambda message, call: self._embedding.embed(message, call.options()), "generate"
            ),
            "Tokenize": self._unary(pb.TokenizeRequest, lambda message, _: generation.tokenize(message), "generate"),
            "Detokenize": self._unary(
                pb.DetokenizeRequest, lambda message, _: generation.detokenize(message), "generate"
            ),
            "GetModel": self._unary(pb.GetModelRequest, lambda message, _: generation.get_model(message), "generate"),
        }
        admin_methods = {
            "Status": self._unary(pb.StatusRequest, lambda message, _: admin.status(message), "observe"),
            "Drain": self._unary(pb.DrainRequest, lambda message, _: admin.drain(message), "manage"),
            "Explain": self._unary(
                pb.GenerateRequest, lambda message, call: generation.explain(message, tenant=call.tenant), "observe"
            ),
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(GENERATION_SERVICE, generation_methods),
                grpc.method_handlers_generic_handler(ADMIN_SERVICE, admin_methods),
            )
        )

    def _unary(
        self,
        kind: type[RequestMessage],
        method: "Callable[[RequestMessage, CallInfo], Awaitable[Message]]",
        scope: Scope,
    ) -> Handler:
        """A handler for a method that returns one message."""

        async def handle(messages: RequestIterator, context: Context) -> bytes:
            try:
                call = CallInfo(context, self._authenticate(context, scope))
                response = await method(await self._read_message(kind, messages), call)
                return response.SerializeToString()
            except Exception as error:  # every call gets a status
                await abort_with(context, error)

        return grpc.stream_unary_rpc_method_handler(handle)

    def _streaming(
        self,
        kind: type[RequestMessage],
        method: "Callable[[RequestMessage, CallInfo], AsyncGenerator[Message, None]]",
        scope: Scope,
    ) -> Handler:
        """A handler for a method that yields messages. The method's generator is closed when the client disconnects or
        reads too slowly."""

        async def handle(messages: RequestIterator, context: Context) -> None:
            try:
                call = CallInfo(context, self._authenticate(context, scope))
                async with aclosing(method(await self._read_message(kind, messages), call)) as events:
                    async for event in events:
                        await self._write(context, event)
            except Exception as error:  # every call gets a status
                await abort_with(context, error)

        return grpc.stream_stream_rpc_method_handler(handle)

    def _authenticate(self, context: Context, scope: Scope) -> Tenant:
        """Raises Unauthenticated or PermissionDenied."""
        keys = (value for key, value in context.invocation_metadata() or () if key == "authorization")
        certificate = context.auth_context().get("x509_pem_cert", ()) if self._authenticator.is_enabled else ()
        return self._authenticator.authenticate(
            next((key for key in keys if isinstance(key, str)), None), scope, certificate=next(iter(certificate), None)
        )

    async def _read_message(self, kind: type[RequestMessage], messages: RequestIterator) -> RequestMessage:
        """The call's only message. Raises InvalidRequest if there is none, if its bytes are not a message of type
        `kind`, or if a long message has too many entries."""
        try:
            data = await anext(messages)
        except StopAsyncIteration:
            # A message that is too long, as it is sent or once gRPC has uncompressed it, comes here as the call's end.
            raise InvalidRequest(
                f"the call ended without a whole message of at most {MESSAGE_BYTES} bytes uncompressed; send one"
            ) from None
        if len(data) > _LONG_MESSAGE_BYTES:
            await self._side.run(check_bytes, kind, data)
        return parse_message(kind, data)

    async def _write(self, context: Context, event: Message) -> None:
        """Waits until gRPC has taken the event; raises SlowReader after slow_reader_seconds, and CancelledError if the
        client has gone."""
        try:
            async with asyncio.timeout(self._slow_reader_seconds):
                await context.write(event.SerializeToString())
        except TimeoutError:
            raise SlowReader(
                f"nothing was read from this stream for {self._slow_reader_seconds:g} s; read it as it comes, or ask "
                "for less"
            ) from None
        except grpc.aio.InternalError:  # gRPC cancels this task too, but only later
            raise asyncio.CancelledError from None


@dataclass(frozen=True, slots=True)
class CallInfo:
    """The context and the tenant of a call, for its method."""

    context: Context
    tenant: Tenant

    def options(self) -> CallOptions:
        """The tenant, and what the call's metadata sets. If the metadata asks for an explanation of the routing
        decision, the trailing metadata will contain it."""
        metadata = self.context.invocation_metadata() or ()
        seconds = self.context.time_remaining()
        options = CallOptions(
            self.tenant,
            {key: value for key, value in metadata if key in TRACE_CONTEXT_HEADERS and isinstance(value, str)},
            asyncio.get_running_loop().time() + seconds if seconds is not None else None,
        )
        if not wants_explanation(metadata):
            return options
        return replace(options, on_decision=lambda made: self.context.set_trailing_metadata(trailing_metadata(made)))


async def abort_with(context: Context, error: Exception) -> Never:
    """Ends the call with the error's status; see `report_error`. Trailing metadata that is set already is kept."""
    status = rpc_status.to_status(grpc_status(report_error(error)))
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    try:
        await context.abort(status.code, status.details, trailing)
    except grpc.aio.AbortError:
        raise
    except Exception:  # the client has disconnected before it got the status
        # gRPC logs a traceback for any other exception than this one and the AbortError that it could not raise.
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")
