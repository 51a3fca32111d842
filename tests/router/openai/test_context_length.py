"""Requests that are longer than the context, as OpenAI's client sees them refused."""

import json
from typing import Any

import openai
import pytest

from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT: list[Any] = [{"role": "user", "content": "a"}]
SAID: list[Any] = [{"role": "user", "content": "a fox " * 200}]
# What is too long for a context of 256 tokens, and what the message says beside that.
TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a prompt of ids": (TEXT, {"prompt": [5] * 300}, "the prompt has 300"),
    "a prompt that leaves no room": (TEXT, {"prompt": [5] * 256}, "the prompt has 256"),
    "a text": (TEXT, {"prompt": "a fox " * 200}, "the prompt has "),
    "a very long text": (TEXT, {"prompt": "ab " * 10_000}, "the prompt has far more than 256 tokens"),
    "one prompt of two": (TEXT, {"prompt": [[5], [5] * 300]}, "the prompt has 300"),
    "prompt and max_tokens": (
        TEXT, {"prompt": [5] * 56, "max_tokens": 201}, "the prompt has 56 and max_tokens is 201"),
    "prompt and 16 tokens": (TEXT, {"prompt": [5] * 250}, "the prompt has 250 and max_tokens is 16"),
    "prompt and min_tokens": (
        TEXT, {"prompt": [5] * 200, "min_tokens": 100, "max_tokens": 100}, "the prompt has 200 and max_tokens is 100"),
    "a very long text with its ids": (
        TEXT, {"prompt": "ab " * 100_000, "return_token_ids": True}, "the prompt has far more than 256 tokens"),
    "messages": (CHAT, {"messages": SAID}, "the prompt has "),
    "messages and max_tokens": (CHAT, {"messages": SHORT, "max_tokens": 300},
                                "and max_tokens is 300"),
    "messages and min_tokens": (
        CHAT, {"messages": SHORT, "min_tokens": 300}, "and min_tokens is 300"),
    "messages and max_completion_tokens": (
        CHAT, {"messages": SHORT, "max_completion_tokens": 300}, "max_tokens is 300"),
    "very long messages": (
        CHAT, {"messages": [{"role": "user", "content": "ab " * 10_000}]}, "the prompt has far more than 256 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_the_context_is_said_in_openai_s_words(
    start_http_router: StartHttpRouter, stream: bool
) -> None:
    """Whichever way a request overflows the context, its error has OpenAI's code, its field, and how many fit."""
    group = FakeGroup()
    router = await start_http_router(group)
    for case, (path, body, words) in TOO_LONG.items():
        with pytest.raises(openai.BadRequestError) as refused:
            if path == TEXT:
                await router.openai.completions.create(model="tiny", prompt="", stream=stream, extra_body=body)
            else:
                await router.openai.chat.completions.create(model="tiny", messages=[], stream=stream, extra_body=body)
        error = refused.value
        assert error.code == "context_length_exceeded", (case, error)
        assert (error.type, error.param) == ("invalid_request_error", "prompt" if path == TEXT else "messages"), case
        message = str(error.body["message"])  # type: ignore[index]  # of the one error
        assert message.startswith("This model's maximum context length is 256 tokens; the prompt has "), (case, message)
        assert words in message, (case, message)
    assert all(list(submit.prompt_token_ids) == [5] for submit in group.submits)  # of two prompts, the other


async def test_only_the_context_has_that_code(start_http_router: StartHttpRouter) -> None:
    """A request that is refused for another reason has no such code, and /tokenize counts prompts beyond the
    context."""
    router = await start_http_router(FakeGroup())
    assert (await router.expect_refusal(TEXT, {"prompt": [700]}))["code"] is None
    status, _, text = await router.request("POST", "/tokenize", {"prompt": "a fox " * 200})
    assert status == 200 and json.loads(text)["count"] > 256
