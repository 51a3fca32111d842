"""/v1/chat/completions with OpenAI's own client, against scripted groups."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, SamplingParams
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, TOOL_TEMPLATE, WEATHER, allows, saying, streamed_calls
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model whose template knows tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("tools"), TOOL_TEMPLATE)))


async def prompt_of(router: HttpRouter, **body: Any) -> str:
    """The text of the prompt that the group got for a chat."""
    await router.openai.chat.completions.create(model="tiny", max_tokens=1, **body)
    return await router.last_prompt()


async def test_a_chat_is_the_one_that_grpc_gives(start_http_router: StartHttpRouter) -> None:
    """The same messages and seed give the same text over both protocols, whole and streamed."""
    router = await start_http_router(FakeGroup())
    sampling = SamplingParams(max_tokens=10, seed=5)
    chat = Chat(messages=[ChatMessage(role="user", content="hello")])
    wanted = await router.generation.Generate(GenerateRequest(chat=chat, sampling=sampling))
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, seed=5)
    whole = await router.openai.chat.completions.create(**asked, max_completion_tokens=10)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.choices[0].text)
    assert (choice.finish_reason, whole.object) == ("length", "chat.completion")
    streamed: dict[str, Any] = dict(**asked, max_tokens=10, stream=True, stream_options={"include_usage": True})
    stream = await router.openai.chat.completions.create(**streamed)
    chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == wanted.choices[0].text
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]].count("assistant") == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage and whole.usage is not None


async def test_logprobs_come_with_bytes(start_http_router: StartHttpRouter) -> None:
    """Each token has its text, its bytes and its score, in a stream as in a whole answer."""
    router = await start_http_router(FakeGroup())
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, seed=5, max_tokens=6, logprobs=True, top_logprobs=1)
    (choice,) = (await router.openai.chat.completions.create(**asked)).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content
    assert {token.logprob for token in choice.logprobs.content} == {-1.0}
    streamed: list[Any] = []
    async for chunk in await router.openai.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == choice.logprobs.content


async def test_content_may_come_in_parts(start_http_router: StartHttpRouter) -> None:
    """The text of text parts is joined; any other part is refused by its type."""
    router = await start_http_router(FakeGroup())
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in await prompt_of(router, messages=[{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    error = await router.expect_refusal("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]})
    assert "text" in error["message"] and error["param"].startswith("messages.0.content")


async def test_tools_are_shown_to_the_model(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """The template gets tools, earlier calls as objects, and answers of tools; with tool_choice `none` it gets no
    tool."""
    router = await start_http_router(saying("yes"), tokenizer=tool_model)
    history: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    shown = await prompt_of(router, messages=history, tools=[WEATHER])
    assert f"[tool {json.dumps(WEATHER)}]" in shown
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call><tool>rain' in shown
    assert "[tool" not in await prompt_of(router, messages=HELLO, tools=[WEATHER], tool_choice="none")
    thinking = {"chat_template_kwargs": {"thinking": True}}
    assert (await prompt_of(router, messages=HELLO, extra_body=thinking)).endswith("<think>")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_in_the_text_is_a_tool_call(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson, stream: bool
) -> None:
    """Text before a call stays text, the call is a tool call, and finish_reason is tool_calls."""
    text = 'let me see<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    router = await start_http_router(saying(text), tokenizer=tool_model)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[WEATHER])
    if stream:
        chunks = [chunk.choices[0] async for chunk in await router.openai.chat.completions.create(**asked, stream=True)]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        calls = streamed_calls(chunks)
        assert all(chunk.delta.content or chunk.delta.tool_calls for chunk in chunks[1:-1]), "no chunk is empty"
        reason = chunks[-1].finish_reason
    else:
        (choice,) = (await router.openai.chat.completions.create(**asked)).choices
        content, reason = choice.message.content or "", choice.finish_reason
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert (content, reason) == ("let me see", "tool_calls")
    assert [(name, json.loads(arguments or "")) for name, arguments in calls] == [("weather", {"city": "Bonn"})]


async def test_a_forced_call_is_structured_output(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson
) -> None:
    """tool_choice by name constrains the answer to the function's arguments, and they come back as a call."""
    group = saying('{"city": "Bonn"}')
    router = await start_http_router(group, tokenizer=tool_model)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[WEATHER])
    (choice,) = (await router.openai.chat.completions.create(**asked, tool_choice=named)).choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bonn"}'  # type: ignore[union-attr]
    schema = json.loads(group.submits[0].sampling.structured.json_schema)
    assert schema == WEATHER["function"]["parameters"]
    with pytest.raises(openai.BadRequestError, match="'clock'"):
        await router.openai.chat.completions.create(
            **asked, tool_choice={"type": "function", "function": {"name": "clock"}}
        )


async def test_strict_functions_are_kept_to(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """With `auto` a strict function's call must fit its schema, wherever in the text it comes."""
    group = saying("no call")
    router = await start_http_router(group, tokenizer=tool_model)
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    (choice,) = (await router.openai.chat.completions.create(model="tiny", messages=HELLO, tools=[strict])).choices
    assert choice.message.content == "no call" and choice.finish_reason == "stop"
    grammar = Grammar.from_message(group.submits[0].sampling.structured)
    opened = 'so <tool_call>\n{"name": "weather", "arguments": {"'
    assert allows(grammar, opened + 'city": "Bonn"}}\n</tool_call> and more') and not allows(grammar, opened + "town")


async def test_required_calls_are_a_list(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """tool_choice required gives at least one call; without parallel calls, one."""
    router = await start_http_router(
        saying('[{"name": "weather", "arguments": {"city": "Bonn"}}]'), tokenizer=tool_model
    )
    (choice,) = (
        await router.openai.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
        )
    ).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "weather"  # type: ignore[union-attr]
    grammar = Grammar.from_message(router.groups[0].submits[0].sampling.structured)
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    assert allows(grammar, f"[{call}]") and not allows(grammar, "[]") and not allows(grammar, f"[{call}, {call}]")


CITY = '{"city": "Bonn"}'
CALLS = f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "weather", "arguments": {CITY}}}]'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_call_that_max_tokens_cuts_is_a_call(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson, choice: str, stream: bool
) -> None:
    """The call has the part of its arguments that was generated, finish_reason is length, and the content is empty."""
    text = CALLS if choice == "required" else CITY
    whole = [("weather", CITY)] * (2 if choice == "required" else 1)
    router = await start_http_router(saying(text), tokenizer=tool_model)
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[WEATHER], tool_choice=forced)
    seen = set()
    for length in range(1, len(byte_level_tokenizer().encode(text).ids)):
        if stream:
            answer = await router.openai.chat.completions.create(**asked, max_tokens=length, stream=True)
            chunks = [chunk.choices[0] async for chunk in answer]
            content = "".join(chunk.delta.content or "" for chunk in chunks)
            calls = streamed_calls(chunks)
            reason = chunks[-1].finish_reason
        else:
            (made,) = (await router.openai.chat.completions.create(**asked, max_tokens=length)).choices
            content, reason = made.message.content or "", made.finish_reason
            calls = [(call.function.name, call.function.arguments) for call in made.message.tool_calls or []]  # type: ignore[union-attr]
        assert (content, reason) == ("", "length")
        assert all(name == "weather" and CITY.startswith(arguments or "") for name, arguments in calls)
        assert calls[:-1] == whole[: len(calls[:-1])]
        seen.add(len(calls))
    assert seen == ({0, 1, 2} if choice == "required" else {1})


BAD = {"type": "object", "properties": {"at": {"anyOf": [{"type": "null"}, {"type": "nothing"}]}}}


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
async def test_a_schema_that_cannot_be_kept_to_is_named(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson, choice: str
) -> None:
    """The error names the tool and the part of its schema, says why, and quotes no rule of the router's grammar."""
    group = saying("no call")
    router = await start_http_router(group, tokenizer=tool_model)
    clock = {"type": "function", "function": {"name": "clock", "parameters": BAD, "strict": True}}
    forced: Any = {"type": "function", "function": {"name": "clock"}} if choice == "named" else choice
    body = {"messages": HELLO, "tools": [WEATHER, clock], "tool_choice": forced}
    for stream in (False, True):
        error = await router.expect_refusal("/v1/chat/completions", {**body, "stream": stream})
        assert error["message"] == (
            "tools[1].function.parameters, of 'clock', cannot be enforced: Invalid type: nothing, at "
            "#/properties/at/anyOf/1; change this schema, or set tool_choice to auto and remove strict"
        )
        assert error["param"] == "tools[1].function.parameters"
    assert not group.submits


@pytest.mark.parametrize(
    ("tool_parser", "parameters", "words"),
    [
        ("qwen3_coder", {"type": "object", "anyOf": []}, "have 'anyOf' at their root"),
        ("gemma4", {"properties": {"x": {"type": "none"}}}, "have the type 'none'"),
        ("hermes", {"properties": {"x": {"enum": ["a" * 300_000]}}}, "bytes as a grammar"),
    ],
)
async def test_a_schema_that_its_format_cannot_enforce_is_named(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson, tool_parser: str, parameters: object, words: str
) -> None:
    """The error's param is the field of the schema, or the tools if all schemas together are too long."""
    group = saying("no call")
    router = await start_http_router(group, tokenizer=tool_model, tool_parser=tool_parser)
    clock = {"type": "function", "function": {"name": "clock", "parameters": parameters, "strict": True}}
    error = await router.expect_refusal("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER, clock]})
    assert words in error["message"]
    assert error["param"] == ("tools" if tool_parser == "hermes" else "tools[1].function.parameters")
    assert not group.submits


async def test_schemas_that_take_too_long_are_counted(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson
) -> None:
    """If the schemas together take too long, the error says how many tools there are, and quotes no rule of the
    grammar."""
    router = await start_http_router(saying("no call"), tokenizer=tool_model)
    parameters = {"properties": {"x": {"type": "integer", "multipleOf": 999_983}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in "fg"]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    error = await router.expect_refusal("/v1/chat/completions", body)
    assert error["message"].startswith("the schemas of 2 tools together cannot be enforced: it takes")
    assert "%json" not in error["message"] and error["param"] == "tools"


class Place(BaseModel):
    """A part of another model and of itself."""

    city: str
    near: "list[Place]" = Field(default_factory=list)


class Route(BaseModel):
    """Two places."""

    start: Place
    end: Place


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
async def test_nested_pydantic_models_are_tools(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson, choice: str
) -> None:
    """Nested models become schemas with references, and the calls of a required or strict function fit them."""
    arguments = {"start": {"city": "Bonn", "near": [{"city": "Köln", "near": []}]}, "end": {"city": "Ulm", "near": []}}
    named = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": "Route", "arguments": {named}}}'
    text = {"required": f"[{call}]", "named": named, "auto": f"<tool_call>\n{call}\n</tool_call>"}
    group = saying(text[choice])
    router = await start_http_router(group, tokenizer=tool_model)
    forced: Any = {"type": "function", "function": {"name": "Route"}} if choice == "named" else choice
    tools = [openai.pydantic_function_tool(Route), openai.pydantic_function_tool(Place)]
    completion = await router.openai.chat.completions.parse(
        model="tiny", messages=HELLO, tools=tools, tool_choice=forced
    )
    (made,) = completion.choices[0].message.tool_calls or []
    assert made.function.parsed_arguments == Route.model_validate(arguments)
    grammar = Grammar.from_message(group.submits[0].sampling.structured)
    assert allows(grammar, text[choice]) and not allows(grammar, text[choice].replace('"Köln"', "5"))


async def test_a_required_call_needs_no_tools_in_the_template(start_http_router: StartHttpRouter) -> None:
    """The grammar alone makes the call, as with vLLM; the prompt is that of the messages."""
    call = '{"city": "Bonn"}'
    for choice, text in (
        ({"type": "function", "function": {"name": "weather"}}, call),
        ("required", f'[{{"name": "weather", "arguments": {call}}}]'),
    ):
        group = saying(text)
        router = await start_http_router(group)
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": 200}
        assert (await router.request("POST", "/v1/chat/completions", body))[0] == 200
        status, _, got = await router.request(
            "POST", "/v1/chat/completions", body | {"tools": [WEATHER], "tool_choice": choice}
        )
        assert status == 200, got
        (made,) = json.loads(got)["choices"][0]["message"]["tool_calls"]
        assert made["function"] == {"name": "weather", "arguments": call}
        plain, forced = group.submits
        assert forced.prompt_token_ids == plain.prompt_token_ids and not plain.sampling.HasField("structured")
        assert allows(Grammar.from_message(forced.sampling.structured), text)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "messages is missing"),
    "empty": ({"messages": []}, "no messages"),
    "role": ({"messages": [{"role": "bard", "content": "x"}]}, "unknown role"),
    "tools": ({"messages": HELLO, "tools": [WEATHER]}, "does not support tools"),
    "strict": (
        {"messages": HELLO, "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
        "does not support tools",
    ),
    "tool choice": ({"messages": HELLO, "tool_choice": "required"}, "tool_choice needs tools"),
    "overridden": ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "must not set 'messages'"),
    "audio": ({"messages": HELLO, "modalities": ["audio"]}, "Unsupported parameter 'modalities'"),
    "functions": ({"messages": HELLO, "functions": [{"name": "f"}]}, "Unsupported parameter 'functions'"),
    "top_logprobs": ({"messages": HELLO, "top_logprobs": 2}, "set logprobs to true"),
    "two limits": ({"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "differ"),
    "one name": (
        {"messages": HELLO, "tools": [WEATHER, {"type": "function", "function": {"name": "clock"}}, WEATHER]},
        "tools[0] and tools[2] are both named 'weather'",
    ),
    "half a pair": ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    "hidden half": ({"messages": HELLO, "chat_template_kwargs": {"eos_token": "\ud800"}}, "refuses"),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]},
        "arguments: it should be a valid string",
    ),
}


async def test_bad_chats_say_what_to_change(start_http_router: StartHttpRouter) -> None:
    """A wrong chat gets a 400 in OpenAI's form, and does not reach a group."""
    group = FakeGroup()
    router = await start_http_router(group)
    for case, (body, words) in REFUSED.items():
        error = await router.expect_refusal("/v1/chat/completions", body)
        assert any(word in error["message"] for word in words.split("|")), (case, error)
        assert error["type"] == "invalid_request_error" and not group.submits, case


async def test_a_model_without_a_template_has_no_chats(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """The error says that there is no template; completions still work."""
    router = await start_http_router(
        FakeGroup(), tokenizer=TokenizerJson.load(str(write_model(tmp_path, template=None)))
    )
    error = await router.expect_refusal("/v1/chat/completions", {"messages": HELLO})
    assert "no chat template" in error["message"]
    assert (await router.openai.completions.create(model="tiny", prompt="a", max_tokens=1)).choices
