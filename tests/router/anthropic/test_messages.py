"""/v1/messages with Anthropic's own client, against scripted groups."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.access.key_holders import SEARCH, write_keys
from tests.router.fake_group import EOS, FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.openai.scripted_chat import allows, saying
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"
)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
OFF: Any = {"type": "disabled"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons and calls tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), TEMPLATE)))


@asynccontextmanager
async def client_of(router: HttpRouter, api_key: str = "none") -> AsyncIterator[Any]:
    """Anthropic's client."""
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)  # reading the authorities would take 50 ms
    url = f"http://{router.http_address}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0, http_client=plain) as client:
        yield client


async def test_a_block_has_no_field_that_is_null(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Vercel's AI SDK refuses a text whose `citations` are null: they are a list, or left out."""
    router = await start_http_router(saying("<think>hm</think>so"), tokenizer=model)
    asked = {"model": "tiny", "max_tokens": 500, "messages": HELLO}
    _, _, whole = await router.request("POST", "/v1/messages", asked)
    _, _, streamed = await router.request("POST", "/v1/messages", asked | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    blocks = json.loads(whole)["content"] + [event["content_block"] for event in events if "content_block" in event]
    assert [block["type"] for block in blocks] == ["thinking", "text"] * 2
    assert all(value is not None for block in blocks for value in block.values())


async def test_a_message_has_thinking_text_and_calls(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Whole and streamed, with the stop reason and the usage; the stream's events build the same message."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}"), tokenizer=model)
    async with client_of(router) as client:
        asked: dict[str, Any] = dict(model="tiny", max_tokens=500, messages=HELLO, tools=[WEATHER])
        whole = await client.messages.create(**asked)
        thinking, text, call = whole.content
        assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert (thinking.thinking, text.text, call.name) == ("hm", "so", "weather")
        assert call.input == {"city": "Bonn"} and whole.stop_reason == "tool_use"
        assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 10
        async with client.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
        assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
            block.model_dump(exclude={"id"}) for block in whole.content
        ]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


async def test_why_a_message_ended(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """end_turn, max_tokens, or stop_sequence with the sequence."""
    router = await start_http_router(saying("one two"), tokenizer=model)
    async with client_of(router) as client:
        asked: dict[str, Any] = dict(model="tiny", messages=HELLO)
        ended = await client.messages.create(**asked, max_tokens=500)
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        assert (await client.messages.create(**asked, max_tokens=1)).stop_reason == "max_tokens"
        stopped = await client.messages.create(**asked, max_tokens=500, stop_sequences=["tw"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "tw")
        assert stopped.content[0].text == "one "


async def test_history_reaches_the_template(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """System texts, thinking, calls, and results of tools, which become messages of their own."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    history: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
            {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and now?"},
        ]},
    ]  # fmt: skip
    async with client_of(router) as client:
        asked: dict[str, Any] = dict(
            model="tiny", messages=history, system=[{"type": "text", "text": "be brief"}], tools=[WEATHER]
        )
        sampling = {"temperature": 0.5, "top_k": 5}
        await client.messages.create(**asked, max_tokens=5, thinking=OFF, extra_body=sampling)
        assert router.groups[0].submits[-1].sampling.top_k == 5
        prompt = await router.last_prompt()
        assert "<system>be brief<user>hello<assistant><think>hm</think>so<tool_call>" in prompt
        assert '{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call><tool>rain<user>and now?' in prompt
        assert prompt.endswith("<think></think>") and '"parameters": {"type": "object"' in prompt
        counted = await client.messages.count_tokens(**asked, thinking=OFF)
        assert counted.input_tokens == len(router.groups[0].submits[-1].prompt_token_ids)


async def test_claude_code_s_version_is_no_part_of_the_prompt(
    start_http_router: StartHttpRouter, model: TokenizerJson
) -> None:
    """Claude Code sends its version first, betas in a header and the query, and system messages between the others."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.84c; cch=a1b2c;"},
        {"type": "text", "text": "x-anthropic-billing-header: cch=a1b2c;\nspeak French"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    ]
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "there are agents"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Read"}]},
        ]},
    ]  # fmt: skip
    async with client_of(router) as client:
        await client.beta.messages.create(
            model="tiny",
            max_tokens=5,
            system=system,
            messages=messages,
            betas=["claude-code-20250219", "context-management-2025-06-27", "effort-2025-11-24"],
            thinking={"type": "adaptive"},
            extra_body={
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "high"},
                "cache_salt": "mine",
                "anthropic_version": "bedrock-2023-05-31",
                "chat_template_kwargs": {"unread": True},
            },
        )
    assert router.groups[0].submits[-1].cache_salt == "mine"
    prompt = await router.last_prompt()
    assert "<tool>Read" in prompt
    assert "cc_version" not in prompt and "<system>speak French\nbe brief<user>hello<system>there are agents" in prompt


async def test_tool_choice_and_structured_output(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """`any` and a named tool constrain the answer to calls, and a format constrains it to its schema."""
    call = '[{"name": "weather", "arguments": {"city": "Bonn"}}]'
    router = await start_http_router(saying(call), tokenizer=model)
    group = router.groups[0]
    async with client_of(router) as client:
        asked: dict[str, Any] = dict(model="tiny", max_tokens=500, messages=HELLO)
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        message = await client.messages.create(**asked, tools=[WEATHER], tool_choice=choice)
        assert [block.type for block in message.content] == ["tool_use"] and message.stop_reason == "tool_use"
        grammar = Grammar.from_message(group.submits[-1].sampling.structured)
        assert allows(grammar, call) and not allows(grammar, call[:-1] + ", " + call[1:])
        named: Any = {"type": "tool", "name": "weather"}
        nothing: Any = {"type": "none"}
        await client.messages.create(**asked, tools=[WEATHER], tool_choice=named)
        assert allows(Grammar.from_message(group.submits[-1].sampling.structured), '{"city": "Bonn"}')
        form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        await client.messages.create(**asked, output_config=form)
        assert allows(Grammar.from_message(group.submits[-1].sampling.structured), "{}")
        await client.messages.create(**asked, tools=[WEATHER], tool_choice=nothing)
        assert not group.submits[-1].sampling.HasField("structured")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens is missing"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content"),
    "their tool": (
        {"tools": [{"type": "web_search_20250305", "name": "w"}]},
        "tools.0.type is 'web_search_20250305'; it should be 'custom'",
    ),
    "unknown": ({"bogus": 1}, "Unknown parameter 'bogus'; remove it"),
    "container": ({"container": "c"}, "'container'"),
    "stops": ({"stop_sequences": ["a"] * 70}, "stop_sequences"),
    "no such tool": ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}}, "'clock'"),
    "nothing": ({"messages": []}, "messages"),
}


async def test_errors_have_anthropic_s_form(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """A wrong body, another model and a path that is no endpoint."""
    router = await start_http_router(FakeGroup(), tokenizer=model)
    least = {"model": "tiny", "messages": HELLO, "max_tokens": 5}
    for case, (changes, words) in REFUSED.items():
        status, _, text = await router.request("POST", "/v1/messages", least | changes)
        body = json.loads(text)
        assert status == 400 and body["type"] == "error", (case, text)
        assert body["error"]["type"] == "invalid_request_error" and words in body["error"]["message"], (case, text)
    async with client_of(router) as client:
        with pytest.raises(anthropic.NotFoundError, match="'other' does not exist"):
            await client.messages.create(model="other", messages=HELLO, max_tokens=5)
    status, _, text = await router.request("GET", "/v1/messages")
    assert status == 405 and json.loads(text)["type"] == "error"


async def test_a_stream_that_fails_ends_with_an_error(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The client raises it."""
    group = FakeGroup(hold_after=2)
    router = await start_http_router(group, tokenizer=model, move_wait_seconds=0.0)
    async with client_of(router) as client:
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
                async for event in stream:
                    if event.type == "content_block_delta":
                        await group.kill()


async def test_x_api_key_is_a_key(start_http_router: StartHttpRouter, model: TokenizerJson, tmp_path: Path) -> None:
    """The header x-api-key is the same as a bearer token, and a wrong key gets 401 in Anthropic's form."""
    keys = write_keys(tmp_path / "keys.yaml")
    router = await start_http_router(saying("yes"), tokenizer=model, key_file=keys)
    async with client_of(router, SEARCH) as client:
        assert (await client.messages.create(model="tiny", max_tokens=5, messages=HELLO)).content
    async with client_of(router, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await client.messages.create(model="tiny", max_tokens=5, messages=HELLO)


async def test_the_answer_goes_on_from_the_assistant_s_text(
    start_http_router: StartHttpRouter, model: TokenizerJson
) -> None:
    """A last message of the assistant is the beginning of the answer; after a call of a tool the answer is a new
    message."""
    router = await start_http_router(saying("blue"), tokenizer=model)
    async with client_of(router) as client:
        asked: dict[str, Any] = dict(model="tiny", max_tokens=9, thinking=OFF)
        begun = [*HELLO, {"role": "assistant", "content": "The sky is"}]
        answer = await client.messages.create(**asked, messages=begun)
        assert answer.content[0].text == "blue" and (await router.last_prompt()).endswith("<assistant>The sky is")
        call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
        parts = [{"type": "text", "text": "so"}, call]
        await client.messages.create(**asked, messages=[*HELLO, {"role": "assistant", "content": parts}])
        assert (await router.last_prompt()).endswith("</tool_call><think></think>")


async def test_documents_are_texts(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Plain documents and search results reach the model, also in the result of a tool, with their titles and
    contexts."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    source = {"type": "text", "media_type": "text/plain", "data": "it rains"}
    document = {"type": "document", "source": source, "title": "Weather", "citations": {"enabled": False}}
    blocks = [{"type": "text", "text": "it"}, {"type": "text", "text": "snows"}]
    other = {"type": "document", "source": {"type": "content", "content": blocks}, "context": "of May"}
    found = {"type": "search_result", "source": "a.org", "title": "Bonn", "content": [{"type": "text", "text": "wet"}]}
    content: list[Any] = [
        {"type": "tool_result", "tool_use_id": "t", "content": [found]}, document, other,
        {"type": "text", "text": "why?"},
    ]  # fmt: skip
    async with client_of(router) as client:
        await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert "<tool>Bonn (a.org)\nwet<user>Weather\nit rains\nof May\nit\nsnows\nwhy?" in await router.last_prompt()


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no such file", "is_error": True}, "no such file"),
        ({"is_error": True}, "error"),
        ({"content": [], "is_error": True}, "error"),
        ({"content": "", "is_error": False}, ""),
    ],
)
async def test_a_tool_that_fails_without_a_word_shows_an_error(
    start_http_router: StartHttpRouter, model: TokenizerJson, result: dict[str, Any], shown: str
) -> None:
    """The model sees the tool's own words, or that there was an error if it has none."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    content: list[Any] = [{"type": "tool_result", "tool_use_id": "t", **result}, {"type": "text", "text": "why?"}]
    async with client_of(router) as client:
        await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert f"<tool>{shown}<user>why?" in await router.last_prompt()


async def test_too_long_is_said_in_anthropic_s_words(start_http_router: StartHttpRouter) -> None:
    """Its clients match these words, and shorten the conversation or lower max_tokens."""
    router = await start_http_router(FakeGroup())
    async with client_of(router) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 300 > 256, decrease"):
            await client.messages.create(model="tiny", max_tokens=300, messages=HELLO)
        long: Any = [{"role": "user", "content": "a fox " * 200}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 255 maximum"):
            await client.messages.create(model="tiny", max_tokens=5, messages=long)


async def test_the_client_runs_tools(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Its tool runner asks the server to keep the conversation, and sends all of it when that is refused."""
    ids = [*byte_level_tokenizer().encode(f"<think>hm</think>so{CALL}").ids, EOS]
    end = [*byte_level_tokenizer().encode("It rains.").ids, EOS]
    group = saying("")
    group.token = lambda submit, choice, position: (ids if len(group.submits) == 1 else end)[position]
    router = await start_http_router(group, tokenizer=model)

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Now."""
        return f"rain in {city}"

    async with client_of(router) as client:
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=99, messages=HELLO, tools=[weather])
        last = await runner.until_done()
    assert last.content[-1].text == "It rains."
    prompt = await router.last_prompt()
    assert "<user>hello<assistant><think>hm</think>so<tool_call>" in prompt and "<tool>rain in Bonn" in prompt
    status, _, text = await router.request(
        "POST", "/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": HELLO, "thread": {"type": "create"}}
    )
    assert status == 400 and json.loads(text)["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_a_schema_that_cannot_be_enforced_is_named_as_in_the_body(
    start_http_router: StartHttpRouter, model: TokenizerJson
) -> None:
    """The error's message begins with the field of the Messages API."""
    group = FakeGroup()
    router = await start_http_router(group, tokenizer=model)
    wrong = {"name": "clock", "input_schema": {"type": "nothing"}}
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": HELLO,
        "tools": [{"name": "a", "input_schema": {}}, wrong],
        "tool_choice": {"type": "any"},
    }
    error = await router.expect_refusal("/v1/messages", body)
    assert error["message"].startswith("tools[1].input_schema, of 'clock', cannot be enforced"), error
    assert not group.submits
