"""POST /invocations responds as the endpoint that the body's fields tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.access.key_holders import EYES, SEARCH, write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 5}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["hello", "the dog"], "max_tokens": 3, "seed": 5},
    "/v1/embeddings": {"input": ["hello", "the dog"]},
    "/rerank": {"query": "hello", "documents": ["the dog", "hello"]},
    "/v1/score": {"text_1": "hello", "text_2": ["the dog", "hello"]},
}


def without_ids(text: str) -> Any:
    """The response without what differs between two equal requests."""
    made = json.loads(text)
    return {name: value for name, value in made.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize("path", BODIES)
async def test_each_kind_of_body(start_http_router: StartHttpRouter, path: str) -> None:
    """The response is that of the endpoint; a wrong field is refused as there."""
    router = await start_http_router(FakeGroup())
    wanted = await router.request("POST", path, BODIES[path])
    got = await router.request("POST", "/invocations", BODIES[path])
    assert wanted[0] == got[0] == 200, got[2]
    assert without_ids(got[2]) == without_ids(wanted[2])
    for wrong in ({"no_such_field": 1}, {"model": 5}):
        error = await router.expect_refusal("/invocations", BODIES[path] | wrong)
        assert error == await router.expect_refusal(path, BODIES[path] | wrong)


async def test_streams_and_long_bodies(start_http_router: StartHttpRouter) -> None:
    """A chat is streamed, and a body that a side process validates is served."""
    router = await start_http_router(FakeGroup())
    status, headers, text = await router.request("POST", "/invocations", CHAT | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and text.endswith("[DONE]\n\n")
    long = {"messages": [{"role": "user", "content": "a "} for _ in range(1500)], "max_tokens": 1}
    error = await router.expect_refusal("/invocations", long)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("body", [{}, {"model": "tiny"}, {"prompt": None}, [], "hello", 5])
async def test_a_body_of_no_kind(start_http_router: StartHttpRouter, body: object) -> None:
    """The error names the fields that select an endpoint, or says that the body must be an object."""
    router = await start_http_router(FakeGroup())
    message = (await router.expect_refusal("/invocations", body))["message"]
    assert ("messages, prompt, input, query and text_1" if isinstance(body, dict) else "a JSON object") in message


async def test_keys_need_the_scope_of_the_endpoint(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """A user's key may call it; a monitor's may not, and no key is 401."""
    router = await start_http_router(FakeGroup(), key_file=write_keys(tmp_path / "keys.json"))
    for key, wanted in ((SEARCH, 200), (EYES, 403), ("no-key", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await router.request("POST", "/invocations", CHAT, headers))[0] == wanted
