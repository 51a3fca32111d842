"""ResponseStore: keeps the last responses, so that a request can continue one by its id.

The store is in the memory of one router. Other routers do not know its ids, nor does this router after a restart.
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
    memory; see measure_bytes. `input_items`: those of the request; see listed_items."""

    tenant: str
    response: dict[str, Any]
    messages: Sequence[ChatFields]
    size: int
    input_items: Sequence[dict[str, Any]] = ()


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant, oldest first, and their bytes."""

    stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Keeps at most `max_responses` responses of at most `max_bytes` bytes together.

    Beyond a limit it drops the oldest response of the tenant with the most responses, or the most bytes. So no tenant
    loses a response to a tenant that holds more. The newest response is never dropped. A response of more than
    `max_bytes` bytes is not stored.
    """

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._tenants: dict[str, _TenantResponses] = {}  # none is empty
        self._count = self._bytes = 0

    def add_response(self, stored: StoredResponse) -> None:
        if stored.size > self._max_bytes:
            return
        own = self._tenants.setdefault(stored.tenant, _TenantResponses())
        own.stored[stored.response["id"]] = stored
        own.size += stored.size
        self._count += 1
        self._bytes += stored.size
        while self._count > self._max_responses:
            self._drop_oldest(stored, lambda held: len(held.stored))
        while self._bytes > self._max_bytes:
            self._drop_oldest(stored, lambda held: held.size)

    def find_response(self, response_id: str, tenant: str) -> StoredResponse | None:
        """The stored response with this id; None if the tenant has none."""
        own = self._tenants.get(tenant)
        return own.stored.get(response_id) if own is not None else None

    def delete_response(self, response_id: str, tenant: str) -> bool:
        """Returns whether there was such a response."""
        stored = self.find_response(response_id, tenant)
        if stored is None:
            return False
        self._remove(stored)
        return True

    def check(self) -> None:
        """Raises AssertionError unless the counts are those of the stored responses, within the limits."""
        for held in self._tenants.values():
            assert held.stored and held.size == sum(stored.size for stored in held.stored.values())
        assert self._bytes == sum(held.size for held in self._tenants.values()) <= self._max_bytes
        assert self._count == sum(len(held.stored) for held in self._tenants.values()) <= self._max_responses

    def _drop_oldest(self, newest: StoredResponse, measure: Callable[[_TenantResponses], int]) -> None:
        """Drops the oldest response, but not `newest`, of the tenant for which `measure` is largest."""
        others = [held for tenant, held in self._tenants.items() if tenant != newest.tenant or len(held.stored) > 1]
        self._remove(next(iter(max(others, key=measure).stored.values())))

    def _remove(self, stored: StoredResponse) -> None:
        own = self._tenants[stored.tenant]
        del own.stored[stored.response["id"]]
        own.size -= stored.size
        self._count -= 1
        self._bytes -= stored.size
        if not own.stored:
            del self._tenants[stored.tenant]


def measure_bytes(value: object) -> int:
    """The bytes in memory of a JSON value. An object that occurs twice in it counts twice."""
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
