"""/v1/responses with OpenAI's own client, against scripted groups."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.access.key_holders import OPS, SEARCH, write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import allows, saying
from tests.router.tiny_tokenizer import write_model

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons and calls tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), TEMPLATE)))


async def test_a_response_has_reasoning_text_and_calls(
    start_http_router: StartHttpRouter, model: TokenizerJson
) -> None:
    """Whole and streamed; the events of the stream add up to the response at its end."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}{CALL}"), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=[WEATHER], instructions="be brief")
    whole = await router.openai.responses.create(**asked, reasoning={"effort": "low"})
    assert "<system>be brief<user>hello" in await router.last_prompt() and "[low]" in await router.last_prompt()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.status, whole.output_text, whole.instructions) == ("completed", "so", "be brief")
    assert whole.output[2].arguments == '{"city": "Bonn"}'  # type: ignore[union-attr]
    assert whole.usage is not None and whole.usage.total_tokens > 20
    events: list[Any] = [event async for event in await router.openai.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == "response.completed" and final.output_text == "so"
    for kind, wanted in (
        ("response.output_text.delta", "so"),
        ("response.reasoning_text.delta", "hm"),
        ("response.function_call_arguments.delta", '{"city": "Bonn"}' * 2),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == wanted
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    assert sum(event.type == "response.output_item.added" for event in events) == 4


async def test_the_client_s_stream_helper(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The client builds the same response from the events, which checks their order and their indices."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}"), tokenizer=model)
    tool = openai.pydantic_function_tool(Place, name="weather")["function"]
    tools: Any = [{"type": "function", "name": tool["name"], "parameters": tool["parameters"], "strict": False}]
    async with router.openai.responses.stream(model="tiny", input="hello", tools=tools) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.delta" in kinds and final.output_text == "so"


class Place(BaseModel):
    """A city."""

    city: str


async def test_a_conversation_goes_on(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """previous_response_id brings the input and the output of the responses before, but not their instructions."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}"), tokenizer=model)
    create = router.openai.responses.create
    first = await create(model="tiny", input="hello", instructions="be brief", tools=[WEATHER])
    (call,) = (item for item in first.output if item.type == "function_call")
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = await create(model="tiny", input=[answer], previous_response_id=first.id, tools=[WEATHER])
    assert second.previous_response_id == first.id
    third = await create(model="tiny", input="and now?", previous_response_id=second.id)
    prompt = await router.last_prompt()
    said = '<assistant><think>hm</think>so<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    assert f"<user>hello{said}<tool>rain{said}<user>and now?" in prompt and "be brief" not in prompt
    assert (await router.openai.responses.retrieve(third.id)).output_text == third.output_text
    await router.openai.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError, match="keeps no response"):
        await router.openai.responses.retrieve(third.id)
    unkept = await create(model="tiny", input="hello", store=False)
    with pytest.raises(openai.BadRequestError, match="which this router does not keep") as refused:
        await create(model="tiny", input="hello", previous_response_id=unkept.id)
    assert refused.value.param == "previous_response_id"


async def test_the_output_may_be_the_next_input(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Without a store the client sends the items of the output back."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}"), tokenizer=model)
    history: list[Any] = [{"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}]
    history += [{"role": "user", "content": "hello"}]
    first = await router.openai.responses.create(model="tiny", input=history, tools=[WEATHER], store=False)
    history += [item.model_dump() for item in first.output]
    history += [{"role": "user", "content": [{"type": "input_text", "text": "and now?"}]}]
    await router.openai.responses.create(model="tiny", input=history, store=False)
    said = '<assistant><think>hm</think>so<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    assert f"<system>be brief<user>hello{said}<user>and now?" in await router.last_prompt()


async def test_structured_output_and_forced_calls(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """`parse` returns the model's fields; a forced call fits its schema."""
    router = await start_http_router(saying('{"city": "Bonn"}'), tokenizer=model)
    parsed = await router.openai.responses.parse(model="tiny", input="hello", text_format=Place)
    assert parsed.output_parsed == Place(city="Bonn")
    grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
    assert allows(grammar, '<think>hm</think>{"city": "Bonn"}') and not allows(grammar, '{"town"')
    choice: Any = {"type": "function", "name": "weather"}
    forced = await router.openai.responses.create(model="tiny", input="hello", tools=[WEATHER], tool_choice=choice)
    assert [item.type for item in forced.output] == ["function_call"]


async def test_a_response_that_max_tokens_cuts(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """It is incomplete, with the reason."""
    router = await start_http_router(saying("one two three"), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", max_output_tokens=2)
    cut = await router.openai.responses.create(**asked)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    events: list[Any] = [event async for event in await router.openai.responses.create(**asked, stream=True)]
    assert events[-1].type == "response.incomplete"
    assert events[-2].item == events[-1].response.output[0] and events[-2].item.status == "incomplete"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "c"}, "conversation"),
    "their tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "scores": ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    "limit": ({"max_output_tokens": 0}, "max_output_tokens"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "nothing": ({"input": []}, "input"),
}


async def test_what_is_not_served_is_refused_by_name(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Each wrong body gets a 400 that names the field, and reaches no group."""
    group = FakeGroup()
    router = await start_http_router(group, tokenizer=model)
    for case, (changes, words) in REFUSED.items():
        error = await router.expect_refusal("/v1/responses", {"model": "tiny", "input": "hello"} | changes)
        assert words in error["message"] and words in error["param"], (case, error)
    assert not group.submits


async def test_a_stream_that_fails_says_so(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The last event is response.failed, with the error."""
    group = FakeGroup(hold_after=2)
    router = await start_http_router(group, tokenizer=model, move_wait_seconds=0.0)
    last: Any = None
    async for event in await router.openai.responses.create(model="tiny", input="hello", stream=True):
        if event.type == "response.in_progress":
            await group.kill()
        last = event
    assert last.type == "response.failed" and last.response.error.message


async def test_a_response_is_its_tenant_s_alone(
    start_http_router: StartHttpRouter, model: TokenizerJson, tmp_path: Any
) -> None:
    """Another tenant cannot read, continue or delete it."""
    router = await start_http_router(saying("so"), tokenizer=model, key_file=write_keys(tmp_path / "keys.yaml"))
    mine, theirs = (router.openai.with_options(api_key=key) for key in (SEARCH, OPS))
    made = await mine.responses.create(model="tiny", input="hello")
    assert (await mine.responses.retrieve(made.id)).id == made.id
    for call in (theirs.responses.retrieve(made.id), theirs.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError):
        await theirs.responses.create(model="tiny", input="hello", previous_response_id=made.id)


async def test_vllm_s_sampling_fields(start_http_router: StartHttpRouter) -> None:
    """They mean what they mean in a chat."""
    group = saying("yes")
    router = await start_http_router(group)
    extra = {"top_k": 7, "min_p": 0.25, "seed": 5, "stop": ["x"], "repetition_penalty": 1.5, "priority": 3}
    extra |= {"stop_token_ids": [9], "logit_bias": {"5": -100}, "session_id": "s", "include_reasoning": True}
    extra |= {"enable_response_messages": False, "previous_input_messages": []}
    await router.openai.responses.create(model="tiny", input="hi", extra_body=extra)
    sampling = group.submits[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.repetition_penalty) == (7, 0.25, 5, 1.5)
    assert (list(sampling.stop_token_ids), dict(sampling.logit_bias)) == ([9], {5: -100.0})
    assert group.submits[-1].priority == 3


async def test_codex_is_served(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The body of Codex 0.169 for a model that it does not know, with the tools' schemas cut."""
    router = await start_http_router(saying(f"so{CALL}"), tokenizer=model)
    texts = [("developer", "you are an agent"), ("developer", "skills"), ("user", "the directory"), ("user", "hello")]
    body = {
        "model": "tiny",
        "input": [
            {"type": "message", "id": f"msg_{n}", "role": role, "content": [{"type": "input_text", "text": text}]}
            for n, (role, text) in enumerate(texts)
        ],
        "tools": [
            {**WEATHER, "strict": False, "description": "d"},
            {
                "type": "namespace",
                "name": "multi_agent_v1",
                "description": "d",
                "tools": [{**WEATHER, "strict": False}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a20a0e",
        "client_metadata": {"thread_id": "01a20a0e", "x-codex-turn-metadata": "{}"},
    }
    status, _, text = await router.request("POST", "/v1/responses", body)
    assert status == 200 and "event: response.completed" in text, text
    shown = await router.last_prompt()
    assert "[tool weather][tool multi_agent_v1__weather]" in shown
    assert "<system>you are an agent\n\nskills<user>the directory<user>hello" in shown


async def test_texts_have_log_probabilities(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """With `include` each token of the text has its own and the alternatives', whole and streamed; reasoning, markers
    and calls have none. `top_logprobs` alone has no effect, as with OpenAI."""
    group = saying(f"<think>hm</think>so fine{CALL}")
    group.with_tops = True
    router = await start_http_router(group, tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=[WEATHER], max_output_tokens=200)
    scored: dict[str, Any] = {**asked, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await router.openai.responses.create(**scored)
    (text,) = (part for item in whole.output if item.type == "message" for part in item.content)
    assert text.type == "output_text" and text.logprobs is not None
    assert "".join(token.token for token in text.logprobs) == text.text == "so fine"
    assert [len(token.top_logprobs) for token in text.logprobs] == [2] * len(text.logprobs)
    events: list[Any] = [event async for event in await router.openai.responses.create(**scored, stream=True)]
    for kind in ("response.output_text.delta", "response.output_text.done"):
        tokens = [token.token for event in events if event.type == kind for token in event.logprobs]
        assert "".join(tokens) == "so fine"
    assert events[-1].response.output[1].content == [text]
    others: list[dict[str, Any]] = [{}, {"include": ["web_search_call.results"]}]
    for without in others:
        plain = await router.openai.responses.create(**asked, top_logprobs=2, **without)  # type: ignore[call-overload]
        assert all(part.logprobs == [] for item in plain.output if item.type == "message" for part in item.content)


async def test_items_may_be_sent_by_reference(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """An item of a response that is kept stands for itself; another tenant's or a dropped one is refused."""
    router = await start_http_router(saying(f"<think>hm</think>so{CALL}"), tokenizer=model)
    first = await router.openai.responses.create(model="tiny", input="hello", tools=[WEATHER])
    history: list[Any] = [{"role": "user", "content": "hello"}]
    history += [{"type": "item_reference", "id": item.id} for item in first.output]
    history += [{"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}]  # type: ignore[union-attr]
    second = await router.openai.responses.create(model="tiny", input=history, tools=[WEATHER])
    said = '<assistant><think>hm</think>so<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    assert f"<user>hello{said}<tool>rain" in await router.last_prompt()
    counted = await router.openai.responses.input_tokens.count(model="tiny", input=history, tools=[WEATHER])
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens
    twice: list[Any] = [history[1], history[1]]
    with pytest.raises(openai.BadRequestError, match="refers to an item more than once; send the further copies"):
        await router.openai.responses.create(model="tiny", input=twice)
    beyond: list[Any] = [{"type": "item_reference", "id": f"{first.output[0].id}9"}]
    with pytest.raises(openai.BadRequestError, match="does not keep"):
        await router.openai.responses.create(model="tiny", input=beyond)
    await router.openai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="does not keep; send the item itself"):
        await router.openai.responses.create(model="tiny", input=history)


async def test_allowed_tools_and_verbosity(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The model sees only the allowed tools; the response repeats both fields."""
    router = await start_http_router(saying("yes"), tokenizer=model)
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    tools: Any = [WEATHER, {**WEATHER, "name": "clock"}]
    made = await router.openai.responses.create(
        model="tiny", input="hello", tools=tools, tool_choice=choice, text={"verbosity": "low"}
    )
    prompt = await router.last_prompt()
    assert "[tool weather]" in prompt and "[tool clock]" not in prompt
    assert made.text is not None and made.text.verbosity == "low"
    assert getattr(made.tool_choice, "mode", None) == "auto"


GROUPED: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp",
    "description": "a server's tools",
    "tools": [{**WEATHER, "strict": False}],
}
AGENT_TOOLS: list[Any] = [
    GROUPED,
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_2025_08_26"},
]


@pytest.mark.parametrize(("tools", "field"), [
    ([WEATHER], "tools[1].parameters"),
    ([{"type": "web_search"}], "tools[1].parameters"),
    (None, "tools[0].tools[1].parameters"),
])  # fmt: skip
async def test_a_schema_that_cannot_be_enforced_is_named_as_in_the_body(
    start_http_router: StartHttpRouter, model: TokenizerJson, tools: list[Any] | None, field: str
) -> None:
    """The error names the field of the Responses API, within a namespace too, and counts hosted tools."""
    group = FakeGroup()
    router = await start_http_router(group, tokenizer=model)
    wrong = {"type": "function", "name": "clock", "parameters": {"type": "nothing"}}
    body = {"input": "hello", "tool_choice": "required", "tools": [*(tools or ()), wrong]}
    if tools is None:
        body["tools"] = [{"type": "namespace", "name": "mcp", "tools": [WEATHER, wrong]}]
    error = await router.expect_refusal("/v1/responses", body)
    assert error["param"] == field and error["message"].startswith(f"{field}, of "), error
    assert not group.submits


@pytest.mark.parametrize(("tools", "named"), [
    ([{"type": "web_search"}, WEATHER, {"type": "custom", "name": "weather"}], "tools[1] and tools[2] are both named"),
    ([{"type": "namespace", "name": "a", "tools": [WEATHER]}, WEATHER, WEATHER], "tools[1] and tools[2] are both"),
    ([{"type": "namespace", "name": "a", "tools": [WEATHER, WEATHER]}], "tools[0].tools[0] and tools[0].tools[1] are"),
    ([WEATHER, {"type": "namespace", "name": "n" * 100, "tools": [WEATHER, {**WEATHER, "name": "t" * 30}]}],
     "tools.1.tools.1.name"),
    ([{"type": "namespace", "name": name, "tools": [{**WEATHER, "name": f"t{n}"} for n in range(600)]}
      for name in "ab"], "tools"),
])  # fmt: skip
async def test_wrong_names_of_tools_are_shown_where_the_body_has_them(
    start_http_router: StartHttpRouter, model: TokenizerJson, tools: list[Any], named: str
) -> None:
    """Hosted tools count, and tools in a namespace have the place of both."""
    router = await start_http_router(FakeGroup(), tokenizer=model)
    error = await router.expect_refusal("/v1/responses", {"input": "hello", "tools": tools})
    assert named in error["message"], error


async def test_tools_in_a_namespace(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """The model sees the namespace within the name. Calls have them apart, and so may the history and the choice."""
    called = CALL.replace("weather", "mcp__weather")
    router = await start_http_router(saying(called), tokenizer=model)
    asked: dict[str, Any] = dict(model="tiny", input="hello", tools=AGENT_TOOLS)
    whole = await router.openai.responses.create(**asked)
    assert "[tool mcp__weather]" in await router.last_prompt()
    (call,) = whole.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("mcp", "weather")
    assert [tool.type for tool in whole.tools] == ["namespace"], "a tool that is not offered is not listed"
    events: list[Any] = [event async for event in await router.openai.responses.create(**asked, stream=True)]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.namespace, item.name) for item in done] == [("mcp", "weather")]
    (ended,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert ended.name == "weather"
    history: list[Any] = [
        {"role": "user", "content": "hello"},
        call.model_dump(exclude_none=True),
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    for goes_on in (dict(input=history), dict(input=history[3:], previous_response_id=whole.id)):
        await router.openai.responses.create(**asked | goes_on)
        assert '"name": "mcp__weather"' in await router.last_prompt()
    chosen: Any = {"type": "function", "name": "weather", "namespace": "mcp"}
    forced = await router.openai.responses.create(**asked, tool_choice=chosen)
    assert forced.status in ("completed", "incomplete"), "the function of the namespace is found"


async def test_tools_that_no_client_runs(start_http_router: StartHttpRouter, model: TokenizerJson) -> None:
    """Agents offer a web search beside their functions with every request: the model is not told of it. Alone it was
    meant, and is refused by its type, as are other tools of OpenAI and a choice of the search."""
    router = await start_http_router(saying("so"), tokenizer=model)
    body = {"input": "hello", "tools": AGENT_TOOLS}
    assert (await router.request("POST", "/v1/responses", body))[0] == 200
    assert "web_search" not in await router.last_prompt()
    for wrong, name in (
        (body | {"tools": AGENT_TOOLS[1:]}, "web_search"),
        (body | {"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": "hello", "tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "file_search"),
        ({"input": "hello", "tools": [{**GROUPED, "tools": [{"type": "shell"}]}]}, "tools.0.tools.0"),
    ):
        status, _, text = await router.request("POST", "/v1/responses", wrong)
        assert status == 400 and name in text, text
