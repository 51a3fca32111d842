"""add_small_services(): gRPC's own health and reflection services, limited to messages of a few kilobytes.

The gRPC server accepts messages of tens of megabytes, for long prompts. grpcio's health and reflection services parse
each message on the event loop before anything is checked, and reflection sends the message back. A genuine message
holds only a name, so a longer one is refused unparsed.

Reflection is served as v1 and as v1alpha. The messages of both are the same; grpcio has code only for v1alpha.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

MAX_MESSAGE_BYTES: Final = 4096
_REFLECTION_V1ALPHA: Final = "grpc.reflection.v1alpha.ServerReflection"
_REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def add_small_services(server: grpc.aio.Server, health: HealthServicer, names: Sequence[str]) -> None:
    """Adds the health service and reflection of the services `names`. A message of more than MAX_MESSAGE_BYTES is not
    parsed but answered with RESOURCE_EXHAUSTED."""
    bounded = _BoundedServer(server)
    add_HealthServicer_to_server(health, bounded)
    add_ServerReflectionServicer_to_server(ReflectionServicer(names), bounded)
    add_ServerReflectionServicer_to_server(ReflectionServicer(names), _RenamedServer(bounded))


class _TooLong:
    """Stands for a message that is too long and was not parsed."""

    def __init__(self, size: int) -> None:
        self.size = size


class _BoundedServer:
    """Wraps each handler that the generated add_..._to_server functions register, to limit its messages."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: "Sequence[grpc.GenericRpcHandler[Any, Any]]") -> None:
        self._server.add_generic_rpc_handlers([_BoundedHandlers(handler) for handler in handlers])

    def add_registered_method_handlers(self, service: str, handlers: "Mapping[str, _Handler]") -> None:
        bounded = {name: _bounded(handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, bounded)  # type: ignore[attr-defined]  # grpc-stubs lack it


class _RenamedServer:
    """Adds v1alpha's reflection under the name of v1."""

    def __init__(self, server: _BoundedServer) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Adds nothing: generic handlers know only the old name."""

    def add_registered_method_handlers(self, service: str, handlers: "Mapping[str, _Handler]") -> None:
        assert service == _REFLECTION_V1ALPHA, service
        self._server.add_registered_method_handlers(_REFLECTION_V1, handlers)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_REFLECTION_V1, dict(handlers)),))


class _BoundedHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    def __init__(self, handlers: "grpc.GenericRpcHandler[Any, Any]") -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        handler = self._handlers.service(handler_call_details)
        return None if handler is None else _bounded(handler)


def _bounded(handler: Any) -> _Handler:
    def read(data: bytes) -> Any:
        return handler.request_deserializer(data) if len(data) <= MAX_MESSAGE_BYTES else _TooLong(len(data))

    async def unary_unary(request: Any, context: _Context) -> Any:
        await _require_short(request, context)
        return await handler.unary_unary(request, context)

    async def unary_stream(request: Any, context: _Context) -> None:
        await _require_short(request, context)
        await handler.unary_stream(request, context)

    async def stream_stream(requests: AsyncIterator[Any], context: _Context) -> AsyncGenerator[Any, None]:
        async def checked() -> AsyncGenerator[Any, None]:
            async for request in requests:
                await _require_short(request, context)
                yield request

        async for response in handler.stream_stream(checked(), context):
            yield response

    codec = {"request_deserializer": read, "response_serializer": handler.response_serializer}
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(stream_stream, **codec)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(unary_stream, **codec)
    return grpc.unary_unary_rpc_method_handler(unary_unary, **codec)


async def _require_short(request: object, context: _Context) -> None:
    if isinstance(request, _TooLong):
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the message has {request.size} bytes; this service takes at most {MAX_MESSAGE_BYTES}",
        )
