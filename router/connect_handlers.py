"""ConnectHandlers: the service Generation for clients of the Connect protocol, on the HTTP port.

A unary call is a POST with a message as the body, in JSON or in protobuf. In a streaming call the request, and each
message of the response, is in an envelope: one byte of flags, four bytes of length (big-endian), then the message. The
gRPC port does not speak this protocol. Specification: https://connectrpc.com/docs/protocol
"""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.tracing import TRACE_CONTEXT_HEADERS
from coatcheck.router.event_loop.message_limits import check_bytes, parse_message
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.errors import CONNECT_PATH, connect_error, error_response, report_error
from coatcheck.router.openai.response_sender import ClientDisconnected, while_connected
from coatcheck.router.serving.embed_service import EmbedService
from coatcheck.router.serving.generate_service import CallOptions, GenerateService

_LONG_BYTES: Final = 256 << 10  # parsing a longer body could block the event loop for more than 20 ms
# Encoding a longer message as JSON could block the event loop for more than 30 ms: 100,000 log-probabilities, which are
# 1 MB, took 3.9 s.
_LONG_ANSWER_BYTES: Final = 8 << 10
_HEADER: Final = struct.Struct(">BI")
_COMPRESSED, _END_STREAM = 1, 2

_Kind = TypeVar("_Kind", bound=Message)


class ConnectHandlers:
    """Adds its endpoints to `app`."""

    def __init__(self, app: FastAPI, generation: GenerateService, embedding: EmbedService, side: SideProcesses) -> None:
        self._side = side
        self._stream = generation.generate_stream
        endpoints: dict[str, Any] = {
            "Generate": self._unary(pb.GenerateRequest, generation.generate),
            "Embed": self._unary(pb.EmbedRequest, embedding.embed),
            "Tokenize": self._unary(pb.TokenizeRequest, lambda message, _: generation.tokenize(message)),
            "Detokenize": self._unary(pb.DetokenizeRequest, lambda message, _: generation.detokenize(message)),
            "GetModel": self._unary(pb.GetModelRequest, lambda message, _: generation.get_model(message)),
            "GenerateStream": self._generate_stream,
        }
        for name, endpoint in endpoints.items():
            app.add_api_route(
                f"{CONNECT_PATH}{name}", endpoint, methods=["POST"], response_model=None, include_in_schema=False
            )

    def _unary(
        self, kind: type[_Kind], method: Callable[[_Kind, CallOptions], Awaitable[Message]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            subtype = _codec(request, "application/")
            if subtype is None:
                return Response(status_code=415)
            try:
                message = await self._parse(kind, await _read_body(request), subtype)
                response = await while_connected(request.receive, _as_coroutine(method(message, _options(request))))
                return Response(await self._encode(response, subtype), media_type=f"application/{subtype}")
            except ClientDisconnected:
                raise
            except Exception as error:
                return error_response(report_error(error), CONNECT_PATH)

        return handle

    async def _generate_stream(self, request: Request) -> Response:
        """GenerateStream. The HTTP status is always 200, so an error is in the last message."""
        subtype = _codec(request, "application/connect+")
        if subtype is None:
            return Response(status_code=415)
        body = await _read_body(request)

        async def messages() -> AsyncGenerator[bytes, None]:
            end: dict[str, Any] = {}
            try:
                message = await self._parse(pb.GenerateRequest, _open_envelope(body), subtype)
                async with aclosing(self._stream(message, _options(request))) as events:
                    async for event in events:
                        yield _envelope(await self._encode(event, subtype))
            except Exception as error:
                end = {"error": connect_error(report_error(error))}
            yield _envelope(json.dumps(end).encode(), _END_STREAM)

        return StreamingResponse(messages(), media_type=f"application/connect+{subtype}")

    async def _parse(self, kind: type[_Kind], data: bytes, subtype: str) -> _Kind:
        """Raises InvalidRequest if the data is no message of this kind, or has too many entries."""
        if subtype == "json":
            if len(data) > _LONG_BYTES:
                data = await self._side.run(_to_binary, kind, data)
            else:
                data = _to_binary(kind, data)
        elif len(data) > _LONG_BYTES:
            await self._side.run(check_bytes, kind, data)
        return parse_message(kind, data)

    async def _encode(self, message: Message, subtype: str) -> bytes:
        if subtype == "proto":
            return message.SerializeToString()
        if message.ByteSize() <= _LONG_ANSWER_BYTES:
            return _to_json(message)
        return await self._side.run_unlimited(_to_json, message)


async def _read_body(request: Request) -> bytes:
    """The body. Raises ClientDisconnected if the client disconnects, or if the middleware refuses the body."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None


async def _as_coroutine(response: Awaitable[Message]) -> Message:
    return await response


def _codec(request: Request, prefix: str) -> str | None:
    """The codec in the content type, "json" or "proto"; None for any other content type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    subtype = kind.removeprefix(prefix)
    return subtype if kind.startswith(prefix) and subtype in ("json", "proto") else None


def _options(request: Request) -> CallOptions:
    """The tenant, the trace context, and the deadline of connect-timeout-ms."""
    trace_context = {name: request.headers[name] for name in TRACE_CONTEXT_HEADERS if name in request.headers}
    timeout = request.headers.get("connect-timeout-ms", "")
    if not (timeout.isascii() and timeout.isdigit() and len(timeout) <= 10):
        return CallOptions(request.scope["tenant"], trace_context)
    deadline = asyncio.get_running_loop().time() + int(timeout) / 1000
    return CallOptions(request.scope["tenant"], trace_context, deadline)


def _open_envelope(body: bytes) -> bytes:
    """The message in the one envelope of a streaming call's request. Raises InvalidRequest for anything else."""
    if len(body) < _HEADER.size:
        raise InvalidRequest("the call ended without its message; send one")
    flags, length = _HEADER.unpack_from(body)
    if flags & _COMPRESSED:
        raise InvalidRequest("the message is compressed; send it uncompressed")
    if len(body) != _HEADER.size + length:
        sent = len(body) - _HEADER.size
        raise InvalidRequest(f"the envelope has {sent} bytes, and its header says {length}; send one message")
    return body[_HEADER.size :]


def _envelope(data: bytes, flags: int = 0) -> bytes:
    return _HEADER.pack(flags, len(data)) + data


def _to_json(message: Message) -> bytes:
    return json_format.MessageToJson(message, indent=None, ensure_ascii=True).encode()


def _to_binary(kind: type[Message], data: bytes) -> bytes:
    """The binary form of a message in JSON. Raises InvalidRequest."""
    try:
        return json_format.Parse(data or b"{}", kind()).SerializeToString()
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a {kind.DESCRIPTOR.full_name} in JSON: {error}") from None
