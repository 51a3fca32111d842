"""A router that also listens for HTTP, OpenAI's own client, and a plain one that may send anything."""

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from coatcheck.bench.setup.patience import PATIENCE_SECONDS
from tests.router.door import Door


class Web:
    """A door with its HTTP side."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.address = door.router.http_address
        self.openai = openai.AsyncOpenAI(base_url=f"http://{self.address}/v1", api_key="none", max_retries=0)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """(status, headers, text); bytes are sent as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return await asyncio.to_thread(self._ask, method, path, data, headers or {})

    def _ask(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of a request that must be refused so."""
        got, _, text = await self.ask("POST", path, body)
        assert got == status, text
        error: dict[str, Any] = json.loads(text)["error"]
        return error


OpenWeb = Callable[..., Awaitable[Web]]
