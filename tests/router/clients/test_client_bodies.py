"""What clients in the wild send: forms that mean the same, fields that cannot change the answer, and wrong ones."""

import asyncio
import json
from typing import Any

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, WEATHER, allows, saying
from tests.router.tiny_tokenizer import write_model

CHAT = "/v1/chat/completions"
LEAST: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if verbosity %}[{{ verbosity }}]{% endif %}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
)
CALL = {"name": "weather", "arguments": '{"city": "Bonn"}'}


def called(**call: Any) -> dict[str, Any]:
    """A message of the assistant with one call."""
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": call}]}


# What is sent, and what the prompt then has.
SAME: dict[str, tuple[dict[str, Any], str]] = {
    "parts of the Responses API": (
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "hey"}]}]}, "<user>hey<"),
    "texts in place of parts": ({"messages": [{"role": "user", "content": ["a", "b"]}]}, "<user>a\nb<"),
    "a refusal": (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}, "nt>no<"),
    "thinking": (
        {"messages": [{"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]}, *HELLO]}, "(hm)yes<"),
    "arguments that are an object": (
        {"messages": [*HELLO, called(name="weather", arguments={"city": "Bonn"})]}, '"arguments": {"city": "Bonn"}'),
    "arguments that max_tokens has cut": (
        {"messages": [*HELLO, called(name="weather", arguments='{"city": "Bo')]},
        '"arguments": {"invalid_json": "{\\"city\\": \\"Bo"}'),
    "arguments that are a list": (
        {"messages": [*HELLO, called(name="weather", arguments="[1]")]}, '"arguments": {"invalid_json": "[1]"}'),
    "a list in place of arguments": (
        {"messages": [*HELLO, called(name="weather", arguments=["Bonn"])]},
        '"arguments": {"invalid_json": "[\\"Bonn\\"]"}'),
    "arguments that are null": ({"messages": [*HELLO, called(name="weather", arguments="null")]}, '"arguments": {}'),
    "no arguments": ({"messages": [*HELLO, called(name="weather", arguments=None)]}, '"arguments": {}'),
    "a part of reasoning": (
        {"messages": [{"role": "assistant", "content": [{"type": "reasoning", "text": "hm"}]}, *HELLO]}, "(hm)<user>"),
    "a result in parts": (
        {"messages": [*HELLO, called(**CALL), {"role": "tool", "tool_call_id": "c", "content": [
            {"type": "text", "text": "rain"}]}]}, "<tool>rain"),
    "a tool without its type": ({"tools": [{"function": WEATHER["function"]}]}, "[weather]"),
    "a cached tool": ({"tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}}]}, "[weather]"),
    "auto without tools": ({"tools": [], "tool_choice": "auto"}, "<user>hello<"),
    "a choice that repeats its function": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {**CALL, "description": "d"}}},
        "[weather]"),
    "no alternatives": ({"top_logprobs": 0}, "<user>hello<"),
    "verbosity": ({"verbosity": "low"}, "[low]"),
    "no effort": ({"reasoning_effort": "none"}, "[False]"),
    "an effort": ({"reasoning_effort": "low"}, "[True]"),
    "an effort and a switch": (
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "[False]"),
    "Qwen's switch": ({"enable_thinking": False, "reasoning_effort": "low"}, "[False]"),
    "GLM's and Kimi's switch": ({"thinking": {"type": "disabled", "clear_thinking": True}}, "[False]"),
    "their switch on": ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "[True]"),
    "their automatic": ({"thinking": {"type": "auto"}}, "<user>hello<assistant>"),
    "OpenRouter's effort": ({"reasoning": {"effort": "low", "exclude": False}}, "[True]"),
    "OpenRouter's switch": ({"reasoning": {"enabled": False}}, "[False]"),
    "a developer": ({"messages": [{"role": "developer", "content": "short"}, *HELLO]}, "<system>short<user>hello"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model whose template shows what it gets."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), TEMPLATE)))


async def test_forms_that_mean_the_same(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Each body is served, and its prompt has what was sent."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    for case, (changes, words) in SAME.items():
        status, _, text = await router.request("POST", CHAT, LEAST | changes)
        assert status == 200, (case, text)
        assert words in (prompt := await router.last_prompt()), (case, prompt)


async def test_a_json_object_may_have_a_schema(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """`schema` beside the type, as llama.cpp's clients send it, is enforced."""
    router = await start_http_router(saying("{}"), tokenizer=model)
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    for kind in ("json_object", "json_schema"):
        body = LEAST | {"response_format": {"type": kind, "schema": schema}}
        assert (await router.request("POST", CHAT, body))[0] == 200
        grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
        assert allows(grammar, '{"a": null}') and not allows(grammar, "{}")


async def test_a_grammar_may_have_two_names(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """guidance sends one grammar under the names of old and of new vLLM; two that differ are refused."""
    router = await start_http_router(saying("a"), tokenizer=model)
    rules = '%llguidance {}\n\nstart: x\nx[capture, max_tokens=50]: "a" | "b"\n'
    twice = LEAST | {
        "guided_decoding_backend": "guidance",
        "guided_grammar": rules,
        "structured_outputs": {"grammar": rules},
    }
    status, _, text = await router.request("POST", CHAT, twice)
    assert status == 200, text
    assert router.groups[0].submits[-1].sampling.structured.grammar == rules
    error = await router.expect_refusal(CHAT, twice | {"guided_grammar": 'start: "c"'})
    assert "several fields ask for structured output" in error["message"]


async def test_echo_begins_with_the_last_message(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """`echo` puts the assistant's last message before the answer, whole and streamed; other messages are not echoed."""
    router = await start_http_router(saying("fine"), tokenizer=model)
    body = {"model": "tiny", "messages": [*HELLO, {"role": "assistant", "content": "so "}], "extra_body": {
        "continue_final_message": True, "add_generation_prompt": False, "echo": True}}  # fmt: skip
    create: Any = router.openai.chat.completions.create
    assert (await create(**body)).choices[0].message.content == "so fine"
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in await create(**body, stream=True)]) == (
        "so fine"
    )
    answer = await create(model="tiny", messages=HELLO, extra_body={"echo": True})
    assert answer.choices[0].message.content == "fine"


# Wrong bodies, the field that the error names, and words of its message.
WRONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an image": (
        CHAT, LEAST | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type", "'text'"),
    "a tool of another kind": (CHAT, LEAST | {"tools": [{"type": "web_search"}]}, "tools.0.type",
                               "is 'web_search'; it must be one of 'function', 'custom'"),
    "another choice": (CHAT, LEAST | {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
                       "tool_choice.type", "'function'"),
    "an unknown item": ("/v1/responses", {"input": [{"type": "computer_call"}]}, "input.0.type",
                        "is 'computer_call'; it must be one of 'function_call'"),
    "an item that is not kept": ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_x"}]}, "input",
                                 "refers to the item 'msg_x', which this router does not keep"),
    "an item that is no object": ("/v1/responses", {"input": [5]}, "input.0", "input.0: it should be an object"),
    "more scores than any model has": (
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 1 << 30},
        "top_logprobs", "less than or equal to 20"),
    "an unknown inclusion": ("/v1/responses", {"input": "a", "include": ["x"]}, "include.0", "logprobs"),
    "a call without a name": ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c"}]},
                              "input.0.name", "is missing"),
    "too many scores": (
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
        "max_output_tokens", "must be at most 1560"),
}  # fmt: skip


async def test_errors_name_the_field_that_was_sent(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The path has no name of a class or of a branch that the client cannot know."""
    group = saying("yes")
    router = await start_http_router(group, tokenizer=model)
    for case, (path, body, field, words) in WRONG.items():
        error = await router.expect_refusal(path, body)
        assert error["param"] == field and words in error["message"], (case, error)
    assert not group.submits


async def test_endpoints_that_clients_probe(start_http_router: StartHttpRouter) -> None:
    """HEAD is GET without a body; a wrong base URL is answered with the right path; /v1/models/ lists the models."""
    router = await start_http_router(FakeGroup())
    for path in ("/v1/models", "/health", "/", "/version"):
        status, headers, text = await router.request("HEAD", path)
        assert (status, text) == (200, ""), path
        assert int(headers["content-length"]) > 0, path
    assert (await router.request("HEAD", CHAT))[0] == 405
    assert json.loads((await router.request("GET", "/v1/models/"))[2])["data"][0]["id"] == "tiny"
    for path in ("/chat/completions", "//v1/chat/completions", "/v1/chat/completions/"):
        error = await router.expect_refusal(path, LEAST, 404)
        assert error["message"].endswith("; use /v1/chat/completions"), path
    assert (await router.expect_refusal("/v1/rerank2", LEAST, 404))["message"].endswith("POST /v1/rerank2")


async def test_a_stream_to_an_http_1_0_client_has_no_chunks(start_http_router: StartHttpRouter) -> None:
    """It ends with the connection; a response of known length has its length."""
    router = await start_http_router(saying("the quick brown fox"))
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 9, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(*router.http_address.split(":"))
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                headers, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        assert b"transfer-encoding" not in headers and b"connection: close" in headers
        assert (b"content-length" in headers) is not stream
        if stream:
            events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n")[:-1]]
            assert events[-1] == b"[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
            assert text == "the quick brown fox"
        else:
            assert json.loads(content)["choices"][0]["text"] == "the quick brown fox"
