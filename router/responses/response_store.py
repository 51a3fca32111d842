"""ResponseStore: the last responses, so that a request can go on after one by its id.

It is kept in the memory of one router. Another router, or this one after a restart, does not know its ids.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.router.responses.input_items import ChatFields

_MAX_RESPONSES: Final = 4096
_MAX_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`messages`: the whole chat up to and with this response, without instructions. `size`: its bytes in
    memory; see measure_bytes."""

    tenant: str
    response: dict[str, Any]
    messages: Sequence[ChatFields]
    size: int


class ResponseStore:
    """Drops the response that was stored first when there are more than `max_responses`, or more than `max_bytes`
    bytes. A response that alone has more bytes is not stored."""

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def add_response(self, stored: StoredResponse) -> None:
        if stored.size > self._max_bytes:
            return
        self._stored[stored.response["id"]] = stored
        self._bytes += stored.size
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def find_response(self, response_id: str, tenant: str) -> StoredResponse | None:
        """None if the tenant has no such response."""
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.tenant == tenant else None

    def delete_response(self, response_id: str, tenant: str) -> bool:
        """Returns whether there was such a response."""
        stored = self.find_response(response_id, tenant)
        if stored is None:
            return False
        del self._stored[response_id]
        self._bytes -= stored.size
        return True

    def check(self) -> None:
        """Raises AssertionError unless the bytes are those of the stored responses, within the limits."""
        assert self._bytes == sum(stored.size for stored in self._stored.values())
        assert len(self._stored) <= self._max_responses and self._bytes <= self._max_bytes


def measure_bytes(value: object) -> int:
    """The bytes in memory of a value of dicts, lists and what JSON has besides. What occurs twice counts twice."""
    size, rest = 0, [value]
    while rest:
        one = rest.pop()
        size += sys.getsizeof(one)
        if isinstance(one, dict):
            rest += one
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return size
