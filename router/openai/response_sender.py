"""Sends responses: JSON in slices, or server-sent events. A side process encodes responses of many values.

Making a JSON object of a million values takes seconds of Python, and encoding it holds the GIL for up to 0.2 s at a
time, also in a thread. The side process gets the protobuf messages and returns bytes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, PromptLogprobs
from coatcheck.proto.stubs.coatcheck_pb2 import Final as FinalEvent
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.json_response import LARGE_VALUES, AsciiJsonResponse, json_bytes

_log = logging.getLogger(__name__)
_SLICE_BYTES: Final = 256 << 10
_Arguments = ParamSpec("_Arguments")
_T = TypeVar("_T")
_Packed = tuple[list[bytes], bytes, bytes]


class ResponseRenderer(Protocol):
    """Renders the response to one request in the form of an API: as one JSON object, or as a stream of events. Can be
    pickled before its first method is called."""

    def make_response(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The response object. `responses`: one for each prompt."""

    def count_values(self, responses: Sequence[GenerateResponse]) -> int:
        """About how many JSON values the response object has."""

    def make_chunk(self, prompt_index: int, event: GenerateEvent) -> "bytes | LargeChunk":
        """The chunk of the stream for an event of prompt number `prompt_index`; may be empty. A chunk of many values is
        returned as a LargeChunk, which a side process encodes."""

    def make_end(self) -> bytes:
        """The end of a stream."""

    def make_error(self, error: Exception) -> bytes:
        """The end of a stream that fails."""


class LargeChunk(Protocol):
    """A chunk that is not encoded yet. It can be pickled."""

    def write(self) -> bytes:
        """The bytes of the chunk."""


Events = AsyncGenerator[tuple[int, GenerateEvent], None]


class LargeResponses:
    """Encodes large responses in the processes of `side`, and all others on the event loop."""

    def __init__(self, side: SideProcesses) -> None:
        self._side = side

    async def make_response(self, renderer: ResponseRenderer, responses: Sequence[GenerateResponse]) -> Response:
        """The HTTP response. `responses`: GenerateService's, one for each prompt."""
        if renderer.count_values(responses) <= LARGE_VALUES:
            return AsciiJsonResponse(renderer.make_response(responses))
        packed = await asyncio.to_thread(_pack, responses)
        return _SlicedJsonResponse(await self._side.run_unlimited(_make_response, renderer, packed))

    async def make_json(
        self, values: int, make: Callable[_Arguments, Any], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> Response:
        """The HTTP response with the value that `make` returns. `values`: about how many JSON values it has."""
        if values <= LARGE_VALUES:
            return AsciiJsonResponse(make(*arguments, **named))
        return _SlicedJsonResponse(await self._side.run_unlimited(_make_json, make, *arguments, **named))

    async def make_chunk(self, renderer: ResponseRenderer, prompt_index: int, event: GenerateEvent) -> bytes:
        made = renderer.make_chunk(prompt_index, event)
        return made if isinstance(made, bytes) else await self._side.run_unlimited(made.write)


class SseResponse(Response):
    """A stream of server-sent events. The caller has awaited the first of `events`, so that an error before it became
    the HTTP status. `events` is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, renderer: ResponseRenderer, large: LargeResponses) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._renderer = renderer
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except (ClientDisconnected, OSError):
            _log.debug("a client disconnected from its stream")

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events), aclosing(self._make_messages()) as messages:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for message in messages:
                await send(message)

    async def _make_messages(self) -> AsyncGenerator[Message, None]:
        """The body, as ASGI messages. The status is sent already, so an error becomes the last event. Errors of `send`
        are not raised here."""
        try:
            async for prompt_index, event in self._events:
                for piece in _sliced(await self._large.make_chunk(self._renderer, prompt_index, event)):
                    yield {"type": "http.response.body", "body": piece, "more_body": True}
            last = self._renderer.make_end()
        except Exception as error:
            last = self._renderer.make_error(error)
        yield {"type": "http.response.body", "body": last, "more_body": False}


class ClientDisconnected(Exception):
    """The client has disconnected, so no response is sent."""


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnected if the client disconnects first, so that
    its blocks are freed. An ASGI application learns of a disconnect only by awaiting `receive`."""
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _SlicedJsonResponse(Response):
    media_type = AsciiJsonResponse.media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in _sliced(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _sliced(data: bytes) -> Iterator[bytes]:
    """`data` in slices of at most _SLICE_BYTES; nothing if it is empty."""
    if len(data) <= _SLICE_BYTES:
        return iter((data,) if data else ())
    return (data[start : start + _SLICE_BYTES] for start in range(0, len(data), _SLICE_BYTES))


def _pack(responses: Sequence[GenerateResponse]) -> list[_Packed]:
    """Serialises each field by itself, so that the thread releases the GIL in between."""
    return [
        (
            [choice.SerializeToString() for choice in response.choices],
            response.prompt_logprobs.SerializeToString(),
            response.final.SerializeToString(),
        )
        for response in responses
    ]


def _unpack(packed: _Packed) -> GenerateResponse:
    choices, scores, final = packed
    return GenerateResponse(
        choices=map(Delta.FromString, choices),
        prompt_logprobs=PromptLogprobs.FromString(scores),
        final=FinalEvent.FromString(final),
    )


def _make_response(renderer: ResponseRenderer, packed: Sequence[_Packed]) -> bytes:
    return json_bytes(renderer.make_response([_unpack(part) for part in packed]))


def _make_json(make: Callable[..., Any], *arguments: Any, **named: Any) -> bytes:
    return json_bytes(make(*arguments, **named))
