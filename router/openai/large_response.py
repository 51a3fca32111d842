"""LargeResponses: makes and encodes responses of many values in a side process.

A JSON object of a million values takes seconds of Python, and a thread that encodes it holds the GIL for up to 0.2 s at
a time. The side process gets the protobuf messages and returns bytes, which are sent in slices.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, PromptLogprobs
from coatcheck.proto.stubs.coatcheck_pb2 import Final as FinalEvent
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.json_response import LARGE_VALUES, AsciiJsonResponse, json_bytes
from coatcheck.router.openai.response_parts import OpenAIResponse

_SLICE_BYTES: Final = 256 << 10
_Arguments = ParamSpec("_Arguments")
_Packed = tuple[list[bytes], bytes, bytes]


class LargeResponses:
    """Makes responses in the processes of `side` if they are large, else on the event loop."""

    def __init__(self, side: SideProcesses) -> None:
        self._side = side

    async def make_response(self, response: OpenAIResponse, responses: Sequence[GenerateResponse]) -> Response:
        """The HTTP response of `response`, for the service's responses to each prompt."""
        if response.count_values(responses) <= LARGE_VALUES:
            return AsciiJsonResponse(response.make_response(responses))
        packed = await asyncio.to_thread(_pack, responses)
        return _SlicedJsonResponse(await self._side.run_unlimited(_make_response, response, packed))

    async def make_json(
        self, values: int, make: Callable[_Arguments, Any], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> Response:
        """The HTTP response with the value that `make` returns. `values`: about how many JSON values it has."""
        if values <= LARGE_VALUES:
            return AsciiJsonResponse(make(*arguments, **named))
        return _SlicedJsonResponse(await self._side.run_unlimited(_make_json, make, *arguments, **named))

    async def make_chunk(self, response: OpenAIResponse, place: int, event: GenerateEvent) -> bytes:
        """The chunk of `response` for an event."""
        writer = response.writer_for_large_chunk(place, event)
        if writer is None:
            return response.make_chunk(place, event)
        return await self._side.run_unlimited(writer.make_delta_chunk, place, event.delta)


class _SlicedJsonResponse(Response):
    media_type = AsciiJsonResponse.media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in sliced(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sliced(data: bytes) -> Iterator[bytes]:
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


def _make_response(response: OpenAIResponse, packed: Sequence[_Packed]) -> bytes:
    return json_bytes(response.make_response([_unpack(part) for part in packed]))


def _make_json(make: Callable[..., Any], *arguments: Any, **named: Any) -> bytes:
    return json_bytes(make(*arguments, **named))
