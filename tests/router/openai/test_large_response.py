"""Large responses are made in a side process. Here small ones are made there too, and compared byte for byte."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from coatcheck.router.event_loop import side_process
from coatcheck.router.http.json_response import json_bytes
from coatcheck.router.openai import completion_response, response_parts, response_sender
from coatcheck.router.openai.logprobs_chunk import ChoiceLogprobs, LogprobsChunk
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.http_router import HttpRouter
from tests.router.router_under_test import launch_router

pytestmark = pytest.mark.asyncio(loop_scope="module")

_TEXT = "naïve 漢字 🙂 fox"
_SCORED: dict[str, Any] = {"prompt": _TEXT, "echo": True, "logprobs": 3, "max_tokens": 6, "seed": 7}
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": _TEXT}], "max_tokens": 6, "seed": 7, "n": 2}
_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "scored": ("/v1/completions", _SCORED),
    "scored, choices": ("/v1/completions", {**_SCORED, "n": 3, "return_token_ids": True}),
    "scored ids": ("/v1/completions", {**_SCORED, "prompt": [[1, 5, 300], [7, 301, 302]], "prompt_logprobs": 2}),
    "scores alone": ("/v1/completions", {**_SCORED, "max_tokens": 0}),
    "scored, streamed": ("/v1/completions", {**_SCORED, "max_tokens": 1, "stream": True}),
    "counted on": (
        "/v1/completions",
        {**_SCORED, "max_tokens": 1, "n": 2, "stream": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "all, streamed": ("/v1/completions", {"prompt": _TEXT, "logprobs": -1, "max_tokens": 1, "seed": 7, "stream": True}),
    "all, echoed": ("/v1/completions", {**_SCORED, "logprobs": -1, "max_tokens": 1, "stream": True}),
    "all of a chat, streamed": (
        "/v1/chat/completions",
        {**_CHAT, "logprobs": True, "top_logprobs": -1, "max_tokens": 1, "n": 1, "stream": True,
         "return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stopped": ("/v1/completions", {**_SCORED, "max_tokens": 40, "stop": ["a", "e", "o"]}),
    "a chat": ("/v1/chat/completions", {**_CHAT, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}),
    "a chat with its ids": ("/v1/chat/completions", {**_CHAT, "return_token_ids": True}),
    "tokens": ("/tokenize", {"prompt": _TEXT, "return_token_strs": True}),
    "a text": ("/detokenize", {"tokens": [5, 300, 301, 302] * 50}),
}  # fmt: skip
_CHANGING = re.compile(r'"created":\d+')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tokenizer: TokenizerJson) -> AsyncIterator[HttpRouter]:
    """One for all of these tests, so that its side processes start once."""
    router = await launch_router(HttpRouter, tokenizer, [FakeGroup(with_tops=True)], http_port=0, max_logprobs=-1)
    await router.wait_for_groups(1)
    yield router
    await router.close()


@pytest.mark.parametrize("kind", _BODIES)
async def test_an_answer_is_the_same_wherever_it_is_written(
    router: HttpRouter, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Body and headers are equal byte for byte, also if the body is sent in slices of three bytes."""
    path, body = _BODIES[kind]

    async def answered(large_values: int) -> tuple[dict[str, str], str]:
        for module in (response_sender, response_parts, completion_response):
            monkeypatch.setattr(module, "LARGE_VALUES", large_values)
        status, headers, text = await router.request("POST", path, body, {"x-request-id": "one"})
        assert status == 200, text
        headers.pop("date", None)
        return headers, _CHANGING.sub("", text)

    in_place = await answered(1 << 30)
    assert await answered(-1) == in_place
    monkeypatch.setattr(response_sender, "_SLICE_BYTES", 3)
    assert await answered(-1) == in_place


async def test_a_stream_goes_on_behind_a_large_chunk(router: HttpRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens after the prompt have the same offsets and log-probabilities, whichever process made the first chunk."""

    async def joined(large_values: int) -> dict[str, list[Any]]:
        for module in (response_sender, response_parts, completion_response):
            monkeypatch.setattr(module, "LARGE_VALUES", large_values)
        status, _, text = await router.request("POST", "/v1/completions", {**_SCORED, "max_tokens": 20, "stream": True})
        assert status == 200, text
        columns: dict[str, list[Any]] = {}
        for line in text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for name, column in choice["logprobs"].items():
                columns.setdefault(name, []).extend(column)
        return columns

    in_place = await joined(1 << 30)
    assert len(in_place["text_offset"]) > 20
    assert await joined(-1) == in_place


async def test_a_text_that_has_the_json_of_the_field(
    router: HttpRouter, tokenizer: TokenizerJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text with the JSON of the field `logprobs` in it is not taken for the field."""
    for module in (response_sender, response_parts, completion_response):
        monkeypatch.setattr(module, "LARGE_VALUES", -1)
    said = '{"logprobs":null}, \\"logprobs\\":null'
    body = {**_SCORED, "prompt": said, "logprobs": 1, "max_tokens": 1, "stream": True}
    status, _, text = await router.request("POST", "/v1/completions", body)
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    assert status == 200 and chunks[0]["choices"][0]["text"].startswith(said)
    chunk = LogprobsChunk.split(
        json_bytes({"text": said, "logprobs": None, "end": None}),
        ChoiceLogprobs(LogprobsFormatter(tokenizer), [], None, 0),
    )
    assert json.loads(chunk.write()) == {"text": said, "logprobs": {"content": [], "refusal": None}, "end": None}


async def test_a_stream_whose_side_process_cannot_start(
    tokenizer: TokenizerJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the system ends the stream as an event; the client does not take the stream for complete."""
    for module in (response_sender, response_parts, completion_response):
        monkeypatch.setattr(module, "LARGE_VALUES", -1)
    monkeypatch.setattr(side_process, "_COMMAND", ("/no such program",))
    fresh = await launch_router(HttpRouter, tokenizer, [FakeGroup(with_tops=True)], http_port=0)
    try:
        await fresh.wait_for_groups(1)
        body = {"prompt": _TEXT, "logprobs": 1, "max_tokens": 3, "stream": True}
        status, _, text = await fresh.request("POST", "/v1/completions", body)
    finally:
        await fresh.close()
    *_, last, done, rest = text.split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
