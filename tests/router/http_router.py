"""HttpRouter: a started router that also listens for HTTP, with OpenAI's client and a client for any bytes."""

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.router.server import Router
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest


class HttpRouter(RouterUnderTest):
    """A RouterUnderTest with clients of its HTTP port."""

    def __init__(self, server: Router, address: str, groups: Sequence[FakeGroup]) -> None:
        super().__init__(server, address, groups)
        self.http_address = server.http_address
        # The port has no TLS: reading the certificate authorities would cost every test 50 ms.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        url = f"http://{self.http_address}/v1"
        self.openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain)

    async def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Returns (status, headers, text). A `body` of bytes is sent as it is, any other as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        return await asyncio.to_thread(self._request, method, path, data, headers or {})

    async def expect_refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Posts `body`, which the router must refuse with `status`; returns the error object."""
        got, _, text = await self.request("POST", path, body)
        assert got == status, text
        error: dict[str, Any] = json.loads(text)["error"]
        return error

    async def last_prompt(self) -> str:
        """The text of the last prompt that the first group got."""
        ids = list(self.groups[0].submits[-1].prompt_token_ids)
        text: str = json.loads((await self.request("POST", "/detokenize", {"tokens": ids}))[2])["prompt"]
        return text

    async def close(self) -> None:
        """Closes the HTTP client too."""
        await self.openai.close()
        await super().close()

    def _request(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(self.http_address, timeout=MAX_WAIT_SECONDS)
        try:
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()


StartHttpRouter = Callable[..., Awaitable[HttpRouter]]
