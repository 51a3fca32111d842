"""Options of chats and completions that other engines have too."""

import asyncio
import json
import time
from typing import Any

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.proto.grammar import Grammar
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import EOS, VOCAB, FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, TOOL_TEMPLATE, WEATHER, allows, saying
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model

CHAT = "/v1/chat/completions"
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model whose template knows tools."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("tools"), TOOL_TEMPLATE)))


async def prompt_of(router: HttpRouter, body: dict[str, Any]) -> str:
    """The text of the prompt that the group gets for a chat."""
    status, _, text = await router.request("POST", CHAT, {"max_tokens": 1, **body})
    assert status == 200, text
    return await router.last_prompt()


async def test_allowed_tools(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """The model sees the allowed tools alone, and with the mode `required` it must call one of them."""
    router = await start_http_router(saying("so"), tokenizer=tool_model)
    named = [{"type": "function", "function": {"name": "weather"}}]

    def body(mode: str, tools: list[Any]) -> dict[str, Any]:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return {"messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice}

    prompt = await prompt_of(router, body("auto", named))
    assert '"weather"' in prompt and '"clock"' not in prompt
    assert not router.groups[0].submits[-1].sampling.HasField("structured")
    await prompt_of(router, body("required", named))
    grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
    assert allows(grammar, '[{"name": "weather", ') and not allows(grammar, '[{"name": "clock", ')
    error = await router.expect_refusal(CHAT, body("auto", [{"type": "function", "function": {"name": "no"}}]))
    assert error["param"] == "tool_choice"


async def test_the_last_message_can_be_continued(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """The prompt ends with the last message's content, without the template's end of it."""
    router = await start_http_router(saying("so"), tokenizer=tool_model)
    messages = [*HELLO, {"role": "assistant", "content": "well "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await prompt_of(router, body)).endswith("<assistant>well ")
    for wrong in ({"add_generation_prompt": True}, {"messages": [{"role": "user", "content": ""}]}):
        error = await router.expect_refusal(CHAT, body | wrong)
        assert error["message"].startswith("continue_final_message"), error


async def test_older_messages_keep_their_text(start_http_router: StartHttpRouter, tool_model: TokenizerJson) -> None:
    """A refusal of OpenAI stands in place of the content, and `function_call` is a tool call with its result."""
    router = await start_http_router(saying("so"), tokenizer=tool_model)
    call = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    called = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
    prompt = await prompt_of(router, {"messages": messages})
    assert prompt == f"<user>hello<assistant>I cannot.<assistant>{called}<tool>noon"


async def test_tokens_can_be_shown_as_ids(start_http_router: StartHttpRouter) -> None:
    """Log-probabilities name tokens by id, in chats and completions."""
    router = await start_http_router(FakeGroup())
    options: dict[str, Any] = dict(model="tiny", max_tokens=3, extra_body={"return_tokens_as_token_ids": True})
    chat = await router.openai.chat.completions.create(messages=HELLO, logprobs=True, **options)
    scored = chat.choices[0].logprobs
    assert scored is not None and all(token.token.startswith("token_id:") for token in scored.content or [])
    text = await router.openai.completions.create(prompt="a", logprobs=1, **options)
    made = text.choices[0].logprobs
    assert made is not None and all(token.startswith("token_id:") for token in made.tokens or [])


async def test_logprobs_of_all_tokens_and_of_named_ones(start_http_router: StartHttpRouter) -> None:
    """A server without a limit returns the whole vocabulary in descending order; every server returns named tokens."""
    router = await start_http_router(FakeGroup(), max_logprobs=-1)
    options: dict[str, Any] = dict(model="tiny", max_tokens=2)
    as_ids: dict[str, Any] = {"return_tokens_as_token_ids": True}
    answer = await router.openai.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=-1, extra_body={**as_ids, "prompt_logprobs": -1}, **options
    )
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.content is not None and len(scored.content) == 2
    for entry in scored.content:
        ids = [int(top.token.removeprefix("token_id:")) for top in entry.top_logprobs]
        assert ids == [9, *(token for token in range(VOCAB) if token != 9)]
        assert [top.logprob for top in entry.top_logprobs[:3]] == [-0.25, -1.0, -1.125]
    prompt = answer.model_extra["prompt_logprobs"] if answer.model_extra else []
    assert len(prompt) > 1 and len(prompt[1]) == VOCAB and prompt[1]["9"]["rank"] == 1 and prompt[1]["0"]["rank"] == 2
    text = await router.openai.completions.create(prompt="a b", logprobs=-1, echo=True, extra_body=as_ids, **options)
    made = text.choices[0].logprobs
    assert made is not None and made.top_logprobs is not None and made.top_logprobs[0] is None
    assert all(len(top) == VOCAB for top in made.top_logprobs[1:])

    limited = await start_http_router(FakeGroup())
    for stream in (False, True):
        body = {"prompt": "a", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [7, 3], "stream": stream, **as_ids}
        status, _, shown = await limited.request("POST", "/v1/completions", body)
        assert status == 200 and '"token_id:7":-0.5,"token_id:3":-0.5' in shown, shown


async def test_too_many_logprobs_are_refused(start_http_router: StartHttpRouter) -> None:
    """Each refusal names the field of the body and says what to change."""
    limited = await start_http_router(FakeGroup())
    unlimited = await start_http_router(FakeGroup(), max_logprobs=-1)
    chat: dict[str, Any] = {"messages": HELLO, "max_tokens": 1, "logprobs": True}
    text: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    for router, path, body, param in (
        (limited, CHAT, {**chat, "top_logprobs": -1}, "top_logprobs"),
        (limited, CHAT, {**chat, "top_logprobs": 21}, "top_logprobs"),
        (limited, CHAT, {**chat, "prompt_logprobs": -1}, "prompt_logprobs"),
        (limited, "/v1/completions", {**text, "logprobs": -1, "echo": True}, "logprobs"),
        (limited, "/v1/completions", {**text, "logprob_token_ids": [5]}, "logprob_token_ids"),
        (limited, "/v1/completions", {**text, "logprobs": 0, "logprob_token_ids": [-5]}, "logprob_token_ids.0"),
        (unlimited, "/v1/completions", {**text, "logprobs": VOCAB + 1}, "logprobs"),
        (unlimited, "/v1/completions", {**text, "logprobs": -2}, "logprobs"),
    ):
        error = await router.expect_refusal(path, body)
        assert error["param"] == param, (body, error)
    wide = {**text, "logprobs": -1, "n": 64, "max_tokens": 200}
    message = (await unlimited.expect_refusal("/v1/completions", {**wide, "stream": True, "max_tokens": 150}))[
        "message"
    ]
    assert "5769600 log-probabilities; at most 4194304" in message
    assert "4,194,304" in (await unlimited.expect_refusal("/v1/completions", wide))["message"]


async def test_all_open_requests_share_a_budget_of_wide_logprobs(start_http_router: StartHttpRouter) -> None:
    """Two requests of 90% of a request's limit each are open: a third gets 429 and when to try again, one that is not
    wide is served, and once one of the two has ended the third is served too."""
    group = FakeGroup(hold_after=0, token=lambda submit, choice, position: EOS)
    router = await start_http_router(group, max_logprobs=-1)
    text: dict[str, Any] = {"prompt": "a", "max_tokens": 200}
    wide = {**text, "logprobs": -1, "n": 31}
    open_ones = [asyncio.create_task(router.request("POST", "/v1/completions", wide)) for _ in range(2)]
    await group.until(lambda: len(group.submits) == 2)
    status, headers, shown = await router.request("POST", "/v1/completions", wide)
    assert status == 429 and int(headers["retry-after"]) >= 1, shown
    assert "too many log-probabilities" in json.loads(shown)["error"]["message"]
    narrow = asyncio.create_task(router.request("POST", "/v1/completions", {**text, "logprobs": 20}))
    await group.until(lambda: len(group.submits) == 3)
    group.go()
    for answer in await asyncio.gather(narrow, *open_ones):
        assert answer[0] == 200
    assert (await router.request("POST", "/v1/completions", wide))[0] == 200


async def test_structural_tags(start_http_router: StartHttpRouter) -> None:
    """Any text is allowed, but after a trigger it must fit the schema."""
    router = await start_http_router(FakeGroup())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {"begin": "<f=x>", "schema": schema, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<f="]}
    status, _, text = await router.request(
        "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, "response_format": form}
    )
    assert status == 200, text
    grammar = Grammar.from_message(router.groups[0].submits[-1].sampling.structured)
    assert allows(grammar, 'so <f=x>{"a": 1}</f> and') and not allows(grammar, 'so <f=x>{"b"')
    mistakes: list[dict[str, Any]] = [{"triggers": ["<g="]}, {"structures": []}]
    for wrong in mistakes:
        error = await router.expect_refusal("/v1/completions", {"prompt": "a", "response_format": form | wrong})
        assert error["param"].startswith("response_format."), error


async def test_a_model_may_have_several_names(start_http_router: StartHttpRouter) -> None:
    """Each is accepted and listed; responses have the first."""
    config = ServeConfig(model="some/model", served_model_name="tiny, small,wee")
    assert (config.model_name, config.model_aliases) == ("tiny", ("small", "wee"))
    router = await start_http_router(FakeGroup(), model_aliases=config.model_aliases)
    answer = await router.openai.completions.create(model="small", prompt="a", max_tokens=1)
    assert answer.model == "tiny"
    assert [model.id async for model in router.openai.models.list()] == ["tiny", "small", "wee"]
    assert (await router.openai.models.retrieve("wee")).id == "wee"
    error = await router.expect_refusal("/v1/completions", {"model": "big", "prompt": "a"}, 404)
    assert error["message"] == "The model 'big' does not exist; this server has 'tiny', 'small', 'wee'"


async def test_load_is_the_number_of_open_requests(start_http_router: StartHttpRouter) -> None:
    """As vLLM's /load."""
    router = await start_http_router(FakeGroup())
    status, _, text = await router.request("GET", "/load")
    assert (status, json.loads(text)) == (200, {"server_load": 0})


async def test_a_prompt_can_be_truncated(start_http_router: StartHttpRouter) -> None:
    """Its last tokens are kept, also of a prompt that is longer than the context; the echo shows what is kept."""
    router = await start_http_router(FakeGroup())
    options: dict[str, Any] = {"max_tokens": 1, "truncate_prompt_tokens": 4}
    for path, body in (
        ("/v1/completions", {"prompt": "a fox " * 200, "echo": True}),
        ("/v1/completions", {"prompt": [[5, 6, 7, 8, 9, 10]]}),
        (CHAT, {"messages": [{"role": "user", "content": "a fox " * 200}], "return_token_ids": True}),
    ):
        status, _, text = await router.request("POST", path, options | body)
        answer = json.loads(text)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 4, text
        kept = list(router.groups[0].submits[-1].prompt_token_ids)
        shown = json.loads((await router.request("POST", "/detokenize", {"tokens": kept}))[2])["prompt"]
        if body.get("echo"):
            assert answer["choices"][0]["text"].startswith(shown)
        if path == CHAT:
            assert answer["prompt_token_ids"] == kept
    for count in (0, -2):
        error = await router.expect_refusal(CHAT, {"messages": HELLO, "truncate_prompt_tokens": count})
        assert error["param"] == "truncate_prompt_tokens"


async def test_a_prompt_is_truncated_to_what_fits(start_http_router: StartHttpRouter) -> None:
    """truncate_prompt_tokens -1 keeps so many tokens that the prompt and max_tokens fill the context. A shorter prompt
    stays as it is."""
    group = FakeGroup()
    router = await start_http_router(group)
    context = group.model.max_model_len
    long = {"prompt": [5] * (context + 9)}
    chat = {"messages": [{"role": "user", "content": "a fox " * context}]}
    for path, body, kept in (
        ("/v1/completions", long | {"max_tokens": 8}, context - 8),
        ("/v1/completions", {"prompt": [5, 6, 7]}, 3),
        (CHAT, chat | {"max_tokens": 3}, context - 3),
        (CHAT, chat, context - 1),
    ):
        status, _, text = await router.request("POST", path, {"truncate_prompt_tokens": -1} | body)
        assert status == 200 and json.loads(text)["usage"]["prompt_tokens"] == kept, text


async def test_a_response_may_have_its_timings(start_http_router: StartHttpRouter) -> None:
    """With enable_per_request_metrics a response of one choice has vLLM's field `metrics`, and so has the last chunk of
    a stream with usage. For several choices or prompts it is null, and without the setting it is not there."""
    router = await start_http_router(FakeGroup(), enable_per_request_metrics=True)
    plain = await start_http_router(FakeGroup("g1"))
    least: list[tuple[str, dict[str, Any]]] = [("/v1/completions", {"prompt": "hello"}), (CHAT, {"messages": HELLO})]
    for path, prompt in least:
        body = prompt | {"max_tokens": 3}
        began = time.monotonic()
        _, _, whole = await router.request("POST", path, body)
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        _, _, chunks = await router.request("POST", path, streamed)
        *before, last = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: {")]
        took = 1000 * (time.monotonic() - began)
        assert not any("metrics" in chunk for chunk in before)
        for metrics in (json.loads(whole)["metrics"], last["metrics"]):
            assert metrics.keys() == {
                "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"
            }  # fmt: skip
            parts = [metrics[name] for name in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")]
            assert min(parts) >= 0 and 0 < sum(parts) < took
            assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 2, abs=0.001)
        for several in ({"n": 2}, {"prompt": ["a", "b"]}):
            if path == CHAT and "prompt" in several:
                continue
            assert json.loads((await router.request("POST", path, body | several))[2])["metrics"] is None
        assert "metrics" not in json.loads((await plain.request("POST", path, body))[2])
    one = json.loads((await router.request("POST", CHAT, {"messages": HELLO, "max_tokens": 1}))[2])["metrics"]
    assert one["mean_itl_ms"] is None and one["generation_time_ms"] == 0


async def test_required_calls_leave_no_room_for_a_structure(
    start_http_router: StartHttpRouter, tool_model: TokenizerJson
) -> None:
    """With required calls a response_format has no effect, because the answer has no content; clients send both."""
    group = saying('[{"name": "weather", "arguments": {"city": "Bonn"}}]')
    router = await start_http_router(group, tokenizer=tool_model)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO, tools=[WEATHER], response_format=schema)
    (choice,) = (await router.openai.chat.completions.create(**asked, tool_choice="required")).choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["weather"]
    assert not group.submits[-1].sampling.structured.HasField("json_schema")


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-3, None)), ("right", slice(3))])
async def test_a_prompt_is_truncated_on_either_side(start_http_router: StartHttpRouter, side: str, kept: slice) -> None:
    """truncate_prompt_tokens keeps the last tokens of a prompt, or with truncation_side "right" the first."""
    group = FakeGroup()
    router = await start_http_router(group)
    ids = byte_level_tokenizer().encode("one two three four").ids
    options = {"truncate_prompt_tokens": 3, "truncation_side": side}
    await router.openai.completions.create(model="tiny", prompt="one two three four", max_tokens=2, extra_body=options)
    assert list(group.submits[-1].prompt_token_ids) == ids[kept]
