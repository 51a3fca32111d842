"""The bytes of HTTP/2 frames and of gRPC calls, for clients that gRPC's own library cannot be."""

import asyncio
import struct
from collections.abc import Mapping
from typing import Final

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
ENDS_STREAM, ENDS_HEAD = 1, 4
MAX_CONCURRENT_STREAMS: Final = 3  # a setting
_CALL: Final = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/coatcheck.v1.Generation/GenerateStream",
    ":authority": "a",
    "content-type": "application/grpc",
    "te": "trailers",
}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


OPENING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")


def head(changes: Mapping[str, str | bytes] = {}) -> bytes:
    """The header fields of a call, in HPACK's plainest form. `changes`: fields that differ, or that are added."""
    return b"".join(_field(name, value) for name, value in {**_CALL, **changes}.items())


def prefixed(message: bytes, *, is_compressed: bool = False, length: int | None = None) -> bytes:
    """A message as gRPC sends it. `length`: what its prefix says, if that is not its length."""
    return struct.pack(">?I", is_compressed, len(message) if length is None else length) + message


def call_frames(stream: int, message: bytes, changes: Mapping[str, str | bytes] = {}) -> bytes:
    """A whole call."""
    return frame(HEADERS, ENDS_HEAD, stream, head(changes)) + frame(DATA, ENDS_STREAM, stream, prefixed(message))


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """The kind, flags, stream and payload of the next frame. Raises IncompleteReadError at the end."""
    start = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(start[:3], "big"))
    return start[3], start[4], int.from_bytes(start[5:], "big"), payload


def _field(name: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b"".join([b"\0", _length(len(name)), name.encode(), _length(len(data)), data])


def _length(value: int) -> bytes:
    """An integer in HPACK, with a prefix of seven bits."""
    if value < 127:
        return bytes([value])
    made, rest = [127], value - 127
    while rest >= 128:
        made.append(rest % 128 | 128)
        rest //= 128
    return bytes([*made, rest])
