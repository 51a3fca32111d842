"""LargeResponses: answers of many values, made and encoded in a side process.

A JSON object of a million values takes seconds of Python, and a thread that encodes it holds the interpreter's lock for
up to 0.2 s at a time. A side process gets the core's messages and returns bytes, which are sent in slices.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent, GenerateResponse, PromptLogprobs
from coatcheck.proto.stubs.coatcheck_pb2 import Final as FinalEvent
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.json_response import LARGE_VALUES, AsciiJsonResponse, json_bytes, large_json
from coatcheck.router.openai.logprobs_format import TokenText

_SLICE_BYTES: Final = 256 << 10
_Arguments = ParamSpec("_Arguments")
_Packed = tuple[list[bytes], bytes, bytes]


class WholeResponse(Protocol):
    """An answer that does not stream; it can be pickled while it is new."""

    def whole(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """The one object."""

    def values(self, responses: Sequence[GenerateResponse]) -> int:
        """About how many values it has."""


class StreamedResponse(Protocol):
    """Turns events into chunks."""

    def chunk(self, place: int, event: GenerateEvent) -> bytes:
        """Of an event of the prompt at `place`; may be empty."""

    def writer_of_large(self, place: int, event: GenerateEvent) -> "DeltaWriter | None":
        """None if the event loop can make the event's chunk. Otherwise what makes the chunk elsewhere; this answer goes
        on as if it had made the chunk itself."""

    def end(self) -> bytes:
        """What comes last."""


class DeltaWriter(Protocol):
    """It can be pickled."""

    def delta_chunk(self, place: int, delta: Delta) -> bytes:
        """The chunk of a delta that is counted already."""


class LargeResponses:
    """Over the router's side processes. A tokenizer that is not in a tokenizer.json exists in this process alone: then
    a thread does the work, in small steps."""

    def __init__(self, side: SideProcesses, tokens: TokenText) -> None:
        self._side = side
        self._is_picklable = tokens.is_picklable

    async def whole(self, answer: WholeResponse, responses: Sequence[GenerateResponse]) -> Response:
        """The response of an answer that does not stream."""
        values = answer.values(responses)
        if values <= LARGE_VALUES or not self._is_picklable:
            return await self.response(values, answer.whole, responses)
        packed = await asyncio.to_thread(_pack, responses)
        return _SlicedBody(await self._side.finish(_whole, answer, packed))

    async def response(
        self, values: int, make: Callable[_Arguments, Any], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> Response:
        """The JSON response of the value that `make` returns. `values`: about how many values the JSON has."""
        if values <= LARGE_VALUES:
            return AsciiJsonResponse(make(*arguments, **named))
        if not self._is_picklable:
            return _SlicedBody(await asyncio.to_thread(lambda: large_json(make(*arguments, **named))))
        return _SlicedBody(await self._side.finish(_json, make, *arguments, **named))

    async def chunk(self, answer: StreamedResponse, place: int, event: GenerateEvent) -> bytes:
        """A stream's chunk of an event."""
        writer = answer.writer_of_large(place, event)
        if writer is None:
            return answer.chunk(place, event)
        if not self._is_picklable:
            return await asyncio.to_thread(writer.delta_chunk, place, event.delta)
        return await self._side.finish(_delta_chunk, writer, place, event.delta)


class _SlicedBody(Response):
    media_type = AsciiJsonResponse.media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in sliced(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sliced(data: bytes) -> Iterator[bytes]:
    """The slices in which `data` is sent; none of it is empty."""
    if len(data) <= _SLICE_BYTES:
        return iter((data,) if data else ())
    return (data[start : start + _SLICE_BYTES] for start in range(0, len(data), _SLICE_BYTES))


def _pack(responses: Sequence[GenerateResponse]) -> list[_Packed]:
    """Each field is a call of its own, so that a thread that packs releases the interpreter's lock in between."""
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


def _whole(answer: WholeResponse, packed: Sequence[_Packed]) -> bytes:
    return json_bytes(answer.whole([_unpack(one) for one in packed]))


def _json(make: Callable[..., Any], *arguments: Any, **named: Any) -> bytes:
    return json_bytes(make(*arguments, **named))


def _delta_chunk(answer: DeltaWriter, place: int, delta: Delta) -> bytes:
    return answer.delta_chunk(place, delta)
