"""ResponseStore: the last responses, so that a request can go on after one by its id.

The store is in the memory of one router. Its ids are unknown to other routers, and to this router after a restart.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Shelf:
    """The responses of one tenant, oldest first, and their bytes."""

    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Keeps at most `max_responses` responses of at most `max_bytes` bytes together.

    Beyond a limit it drops the oldest response of the tenant that holds most of what is limited, so a tenant loses no
    response to one that holds more. The newest response is never dropped, and one that alone has more than `max_bytes`
    bytes is not stored.
    """

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by tenant; none is empty
        self._count = self._bytes = 0

    def add_response(self, stored: StoredResponse) -> None:
        if stored.size > self._max_bytes:
            return
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        shelf.stored[stored.response["id"]] = stored
        shelf.size += stored.size
        self._count += 1
        self._bytes += stored.size
        while self._count > self._max_responses:
            self._drop_oldest(stored, lambda shelf: len(shelf.stored))
        while self._bytes > self._max_bytes:
            self._drop_oldest(stored, lambda shelf: shelf.size)

    def find_response(self, response_id: str, tenant: str) -> StoredResponse | None:
        """None if the tenant has no such response."""
        shelf = self._shelves.get(tenant)
        return shelf.stored.get(response_id) if shelf is not None else None

    def delete_response(self, response_id: str, tenant: str) -> bool:
        """Returns whether there was such a response."""
        stored = self.find_response(response_id, tenant)
        if stored is None:
            return False
        self._remove(stored)
        return True

    def check(self) -> None:
        """Raises AssertionError unless the counts are those of the stored responses, within the limits."""
        for shelf in self._shelves.values():
            assert shelf.stored and shelf.size == sum(stored.size for stored in shelf.stored.values())
        assert self._bytes == sum(shelf.size for shelf in self._shelves.values()) <= self._max_bytes
        assert self._count == sum(len(shelf.stored) for shelf in self._shelves.values()) <= self._max_responses

    def _drop_oldest(self, newest: StoredResponse, held: Callable[[_Shelf], int]) -> None:
        """Drop the oldest response, but not `newest`, of the tenant for which `held` is largest."""
        others = [shelf for tenant, shelf in self._shelves.items() if tenant != newest.tenant or len(shelf.stored) > 1]
        self._remove(next(iter(max(others, key=held).stored.values())))

    def _remove(self, stored: StoredResponse) -> None:
        shelf = self._shelves[stored.tenant]
        del shelf.stored[stored.response["id"]]
        shelf.size -= stored.size
        self._count -= 1
        self._bytes -= stored.size
        if not shelf.stored:
            del self._shelves[stored.tenant]


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
