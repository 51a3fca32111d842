"""Every field of every response and event has the type that OpenAI's and Anthropic's own clients declare for it.

The clients themselves check nothing of what they receive. Here the JSON is validated strictly: a required field that is
missing, a wrong type or an unknown value fails, and so does a field that the client does not know, except for those of
EXTENSIONS.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Union, get_args

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, TOOL_TEMPLATE, WEATHER, saying
from tests.router.tiny_tokenizer import write_model

PATCH = 'a "b"\n'
CALLS = (
    f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
ANSWER = f"<think>hm</think>so {CALLS}"
CUSTOM: Any = {"type": "custom", "custom": {"name": "patch"}}
FLAT: Any = [{"type": "custom", "name": "patch"}, {"type": "function", "strict": False, **WEATHER["function"]}]
CLAUDE: Any = [{"name": name, "input_schema": WEATHER["function"]["parameters"]} for name in ("weather", "patch")]
# Fields of vLLM, SGLang and DeepSeek, and those that OpenAI's API has and its client does not declare. Of a custom tool
# the client declares neither the stream of chat completions nor the status. Older clients need the name in the event.
EXTENSIONS: dict[str, set[str]] = {
    "ChatCompletion": {"prompt_logprobs"},
    "ChatCompletionMessage": {"reasoning", "reasoning_content"},
    "Choice": {"stop_reason"},
    "ChoiceDelta": {"reasoning", "reasoning_content"},
    "ChoiceDeltaToolCall": {"custom"},
    "CompletionChoice": {"prompt_logprobs", "prompt_token_ids", "stop_reason", "token_ids"},
    "Model": {"default_sampling", "max_model_len", "parent", "root"},
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
    "Response": {"store"},
    "ResponseCustomToolCall": {"status"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons and calls tools."""
    template = f"{TOOL_TEMPLATE}{{# <think></think> #}}"
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), template)))


def check(kind: Any, value: dict[str, Any]) -> Any:
    """The value as an object of the client's type. Of a union the classes with the value's type are meant."""
    classes: list[Any] = [
        one for one in get_args(get_args(kind)[0] if get_args(kind) else kind) if isinstance(one, type)
    ]
    named = [one for one in classes if value["type"] in get_args(one.model_fields["type"].annotation)]
    meant: Any = Union[tuple(named)] if named else kind  # noqa: UP007  # of as many classes as there are
    made: Any = TypeAdapter(meant).validate_json(json.dumps(value), strict=True)
    unknown = [(name, field) for name, field in extra_fields(made) if field not in EXTENSIONS.get(name, ())]
    assert unknown == [], value
    return made


def extra_fields(value: object) -> Iterator[tuple[str, str]]:
    """(class, field) of the fields that the client's types lack, at all depths."""
    if isinstance(value, BaseModel):
        yield from ((type(value).__name__, name) for name in value.model_extra or ())
        for name in value.model_fields_set:
            yield from extra_fields(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from extra_fields(one)


async def ask(router: HttpRouter, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of a response."""
    status, _, text = await router.request("POST" if body else "GET", path, body and {"model": "tiny", **body})
    assert status == 200, text
    return json.loads(text)


async def stream(router: HttpRouter, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of the events, whose names are their types. [DONE] ends a stream without names, and only there."""
    status, headers, text = await router.request("POST", path, {"model": "tiny", "stream": True, **body})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    made = []
    blocks = text.removesuffix("\n\n").split("\n\n")
    for block in blocks:
        name, _, data = block.rpartition("\n")
        if data == "data: [DONE]":
            assert block is blocks[-1]
            continue
        event = json.loads(data.removeprefix("data: "))
        assert name == (f"event: {event['type']}" if "type" in event else "")
        made.append(event)
    return made


CHATS: dict[str, dict[str, Any]] = {
    "text": {}, "calls": {"tools": [CUSTOM, WEATHER]}, "choices": {"n": 2},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2}, "cut": {"max_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
async def test_chat_completions(start_http_router: StartHttpRouter, model: TokenizerJson, case: str) -> None:
    """Whole and streamed. The chunks of a stream have one id; each choice has its role once and its reason last; the
    chunk with the usage is the last one."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    body = {"messages": HELLO, "max_tokens": 400, **CHATS[case]}
    whole = check(ChatCompletion, await ask(router, "/v1/chat/completions", body))
    chunks = [
        check(ChatCompletionChunk, {**event, "choices": [_as_function(one) for one in event["choices"]]})
        for event in await stream(router, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    ]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    used = chunks[-1].usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens == whole.usage.total_tokens
    for made in whole.choices:
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == made.index]
        assert [piece.delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [made.finish_reason]
        assert "".join(piece.delta.content or "" for piece in pieces) == (made.message.content or "")
        thought = "".join(getattr(piece.delta, "reasoning", "") for piece in pieces)
        assert thought == (made.message.reasoning or "")


def _as_function(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a chunk whose calls have the only type that the client declares for streams."""
    calls = choice["delta"].get("tool_calls", [])
    return {**choice, "delta": {**choice["delta"], **({"tool_calls": [
        {**call, "type": "function"} if "type" in call else call for call in calls]} if calls else {})}}  # fmt: skip


async def test_completions_and_models(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """A stream's chunks have no reason before the last one, for which the client declares no type."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    body = {"prompt": "hello", "max_tokens": 9, "logprobs": 2}
    check(Completion, await ask(router, "/v1/completions", body))
    chunks = await stream(router, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    for chunk in chunks:
        choices = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
        check(Completion, {**chunk, "choices": choices})
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[-1]["usage"]["completion_tokens"] == 9
    for shown in (await ask(router, "/v1/models"))["data"]:
        check(Model, shown)
        assert await ask(router, f"/v1/models/{shown['id']}") == shown


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5},
    "calls": {"tools": FLAT, "parallel_tool_calls": True},
    "a choice": {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "custom", "name": "patch"}, {"type": "function", "name": "weather"}]}},
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 300},
    "a format": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
    "cut": {"max_output_tokens": 20},
}  # fmt: skip


@pytest.mark.parametrize("case", RESPONSES)
async def test_responses(start_http_router: StartHttpRouter, model: TokenizerJson, case: str) -> None:
    """Whole, kept and streamed. The events are numbered, each item begins, gets its deltas and ends before the next one
    begins, and the last event has the items that have ended."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    body = {"input": "hello", "max_output_tokens": 400, **RESPONSES[case]}
    raw = await ask(router, "/v1/responses", body)
    whole = check(Response, raw)
    assert await ask(router, f"/v1/responses/{whole.id}") == raw
    assert (whole.completed_at is not None) == (whole.status == "completed") == (case != "cut")
    events = [check(ResponseStreamEvent, event) for event in await stream(router, "/v1/responses", body)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    end = events[-1].response
    assert events[-1].type == f"response.{end.status}" == f"response.{whole.status}"
    assert {event.response.id for event in (*events[:2], events[-1])} == {end.id}
    items = _items_of(events[2:-1])
    assert items == end.output and [one.type for one in items] == [one.type for one in whole.output]
    used = end.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens == whole.usage.total_tokens
    reasoning, spoken = used.output_tokens_details.reasoning_tokens, used.output_tokens
    assert 0 < reasoning < spoken


def _items_of(events: list[Any]) -> list[Any]:
    """The items that the events between the first two and the last one build."""
    items: list[Any] = []
    begun, text, kinds = None, "", list[str]()
    for event in events:
        kinds.append(event.type)
        assert event.output_index == len(items)
        if event.type == "response.output_item.added":
            assert begun is None
            begun, text = event.item, ""
            assert begun.status == "in_progress" and not (getattr(begun, "content", None) or [])
            continue
        assert begun is not None
        if event.type == "response.output_item.done":
            assert (event.item.id, event.item.type) == (begun.id, begun.type)
            items.append(event.item)
            begun = None
            continue
        assert event.item_id == begun.id
        if event.type.endswith(".delta"):
            text += event.delta
        elif event.type.endswith("content_part.done"):
            assert event.part.text == text
        elif event.type.endswith(".done"):
            whole = next(getattr(event, name) for name in ("text", "arguments", "input") if hasattr(event, name))
            assert whole == text
    assert begun is None
    for before, behind in pairwise(kinds):
        assert (before == "response.output_item.done") == (behind == "response.output_item.added"), kinds
    return items


MESSAGES: dict[str, dict[str, Any]] = {
    "text": {}, "calls": {"tools": CLAUDE}, "cut": {"max_tokens": 20}, "stopped": {"stop_sequences": ["so"]},
}  # fmt: skip


@pytest.mark.parametrize("case", MESSAGES)
async def test_messages(start_http_router: StartHttpRouter, model: TokenizerJson, case: str) -> None:
    """Whole and streamed. Blocks have consecutive indices, and each ends before the next one begins. The usage at the
    end counts what the whole message counts."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    body = {"messages": HELLO, "max_tokens": 400, **MESSAGES[case]}
    whole = check(Message, await ask(router, "/v1/messages", body))
    raw = await stream(router, "/v1/messages", body)
    assert raw[1] == {"type": "ping"}
    events = [check(RawMessageStreamEvent, event) for event in raw if event["type"] != "ping"]
    assert events[0].type == "message_start" and events[0].message.content == []
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.model_dump() | {"server_tool_use": None} == {
        name: value for name, value in whole.usage.model_dump().items() if name in type(events[-2].usage).model_fields
    }
    blocks: list[Any] = []
    is_open = False
    for event in events[1:-2]:
        assert event.index == len(blocks)
        assert is_open == (event.type != "content_block_start")
        is_open = event.type != "content_block_stop"
        blocks += [event.index] if not is_open else []
    assert not is_open and len(blocks) == len(whole.content)
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    assert whole.usage.output_tokens >= whole.usage.output_tokens_details.thinking_tokens


async def test_the_input_items_of_a_response(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """As the client lists them: page after page, in both orders."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    call = {"call_id": "c", "name": "weather", "arguments": "{}"}
    given: Any = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", **call}, {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "now?"}]},
    ]  # fmt: skip
    made = await router.openai.responses.create(model="tiny", input=given, max_output_tokens=400)
    path = f"/v1/responses/{made.id}/input_items"
    listed = (await ask(router, f"{path}?order=asc&limit=100"))["data"]
    shown = [check(ResponseItem, item) for item in listed]
    kinds = [item.type for item in shown]
    assert kinds == [item.get("type", "message") for item in given if item.get("type") != "web_search_call"]
    assert [part.text for part in shown[-1].content] == ["and", "now?"]
    pages = router.openai.responses.input_items.list(made.id, limit=3)
    assert [item.id async for item in pages] == [item["id"] for item in reversed(listed)]
    assert len({item["id"] for item in listed}) == 8
    text = await router.openai.responses.create(model="tiny", input="hello", max_output_tokens=400)
    (only,) = (await ask(router, f"/v1/responses/{text.id}/input_items"))["data"]
    assert only["content"] == [{"type": "input_text", "text": "hello"}]
    long = await router.openai.responses.create(model="tiny", input=[*given, *given], max_output_tokens=400)
    assert len((await ask(router, f"/v1/responses/{long.id}/input_items?limit=100"))["data"]) == 16
    for wrong in ("after=x", "limit=0", "limit=101", f"limit=000000001{'0' * 5000}", "limit=a", "order=up"):
        status, _, words = await router.request("GET", f"{path}?{wrong}")
        assert status == 400 and json.loads(words)["error"]["param"] == wrong.partition("=")[0], words
    assert (await router.request("GET", "/v1/responses/x/input_items"))[0] == 404


async def test_models_in_anthropic_s_form(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """For requests with the header of Anthropic's clients; their list has all models on one page."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    headers = {"anthropic-version": "2023-06-01"}
    listed = json.loads((await router.request("GET", "/v1/models", None, headers))[2])
    (shown,) = listed.pop("data")
    assert listed == {"has_more": False, "first_id": shown["id"], "last_id": shown["id"]}
    assert check(ModelInfo, shown).max_input_tokens == 2048
    assert json.loads((await router.request("GET", f"/v1/models/{shown['id']}", None, headers))[2]) == shown
    for path, expected in (("/v1/models", 200), ("/v1/models/other", 404)):  # Anthropic's clients read request-id alone
        status, sent, _ = await router.request("GET", path, None, headers)
        assert status == expected and sent["request-id"] == sent["x-request-id"]
    assert "request-id" not in (await router.request("GET", "/v1/models"))[1]


async def test_other_responses(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Counts of tokens; and ids of requests where each client looks for them, also of a refused one."""
    router = await start_http_router(saying(ANSWER), tokenizer=model)
    check(MessageTokensCount, await ask(router, "/v1/messages/count_tokens", {"messages": HELLO}))
    counted = await ask(router, "/v1/responses/input_tokens", {"input": "hello"})
    assert counted.keys() == {"object", "input_tokens"} and counted["object"] == "response.input_tokens"
    for body, status in (({"messages": HELLO, "max_tokens": 5}, 200), ({}, 400)):
        got, headers, text = await router.request("POST", "/v1/messages", {"model": "tiny", **body})
        assert got == status and headers["request-id"] == headers["x-request-id"], text
