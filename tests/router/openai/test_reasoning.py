"""Reasoning in /v1/chat/completions: split off, streamed, and before structured output."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import ReasoningLimit, SamplingParams
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.parsing.reasoning_parser import ReasoningStart
from coatcheck.router.responses.response_store import measure_bytes
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import HELLO, WEATHER, allows, saying
from tests.router.tiny_tokenizer import write_model

# Like Qwen3's: it can open or close the reasoning, or leave that to the model.
TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif reasoning_effort == 'high' %}<think>\n{% endif %}"
    "{% endif %}{# <tool_call> #}"
)
THOUGHT = "<think>\nhm\n</think>\n\nyes"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons."""
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("thinker"), TEMPLATE)))


async def test_reasoning_is_split_off(start_http_router: StartHttpRouter, thinker: TokenizerJson) -> None:
    """It is the message's reasoning_content, whole and streamed; options hide it or leave it in the content."""
    router = await start_http_router(saying(THOUGHT), tokenizer=thinker)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO)
    (choice,) = (await router.openai.chat.completions.create(**asked)).choices
    assert (choice.message.content, choice.message.reasoning_content) == ("yes", "hm")  # type: ignore[attr-defined]
    assert choice.message.reasoning == "hm"  # type: ignore[attr-defined]  # vLLM's name
    chunks = [chunk.choices[0] async for chunk in await router.openai.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == "hm"
    assert "".join(getattr(chunk.delta, "reasoning", None) or "" for chunk in chunks) == "hm"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "yes"
    options: list[tuple[dict[str, Any], str]] = [
        ({"include_reasoning": False}, "yes"),
        ({"reasoning": {"exclude": True}}, "yes"),  # OpenRouter's name
        ({"separate_reasoning": False}, THOUGHT),
    ]
    for option, content in options:
        answer = await router.openai.chat.completions.create(**asked, extra_body=option)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == (content, None)  # type: ignore[attr-defined]


async def test_usage_counts_reasoning_tokens(start_http_router: StartHttpRouter, thinker: TokenizerJson) -> None:
    """reasoning_tokens is the number of tokens with text between the markers: whole, streamed, for several choices, cut
    by max_tokens, in Responses, and 0 without reasoning."""
    router = await start_http_router(saying(THOUGHT), tokenizer=thinker)
    ids = thinker.encode(THOUGHT)
    ends = [len(thinker.decode(ids[:size])) for size in range(len(ids) + 1)]
    first, last = len("<think>"), THOUGHT.index("</think>")
    count = sum(start < last and stop > first for start, stop in pairwise(ends))
    assert 1 < count < len(ends) - 1
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO)

    async def counted(**options: Any) -> int:
        status, _, text = await router.request("POST", "/v1/chat/completions", {**asked, **options})
        assert status == 200, text
        events = text.split("data: ") if options.get("stream") else [text]
        usage = next(json.loads(event)["usage"] for event in reversed(events) if '"completion_tokens_details"' in event)
        return int(usage["completion_tokens_details"]["reasoning_tokens"])

    assert await counted() == await counted(include_reasoning=False) == count
    assert await counted(stream=True, stream_options={"include_usage": True}) == count
    assert await counted(n=3) == 3 * count
    for max_tokens in range(1, len(ends)):
        is_closed = ends[max_tokens] >= last + len("</think>")
        stop_at = last if is_closed else ends[max_tokens]  # a part of the end marker is shown as reasoning
        cut = sum(start < stop_at and stop > first for start, stop in pairwise(ends[: max_tokens + 1]))
        assert await counted(max_tokens=max_tokens) == cut
    assert await counted(separate_reasoning=False) == 0
    assert await counted(chat_template_kwargs={"enable_thinking": False}) == 0
    for stream in (False, True):
        status, _, text = await router.request("POST", "/v1/responses", {"input": "hello", "stream": stream})
        assert status == 200 and f'"reasoning_tokens":{count}' in text.replace(" ", "")


async def test_content_is_null_if_all_is_reasoning(start_http_router: StartHttpRouter, thinker: TokenizerJson) -> None:
    """A model that max_tokens stops while it reasons has no content."""
    router = await start_http_router(saying(THOUGHT), tokenizer=thinker)
    (choice,) = (await router.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9)).choices
    assert choice.message.content is None and choice.finish_reason == "length"


async def test_the_prompt_may_open_or_close_reasoning(
    start_http_router: StartHttpRouter, thinker: TokenizerJson
) -> None:
    """Text after an opened marker is reasoning, and text after a closed one is content."""
    router = await start_http_router(saying("hm</think>yes"), tokenizer=thinker)
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO)
    (opened,) = (await router.openai.chat.completions.create(**asked, reasoning_effort="high")).choices
    assert (opened.message.content, opened.message.reasoning_content) == ("yes", "hm")  # type: ignore[attr-defined]
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    (plain,) = (await router.openai.chat.completions.create(**asked, extra_body=closed)).choices
    assert plain.message.content == "hm</think>yes"


async def test_structured_output_begins_after_reasoning(
    start_http_router: StartHttpRouter, thinker: TokenizerJson
) -> None:
    """The grammar allows reasoning before the structure unless the prompt has closed it, for a schema, a regex and
    required calls."""
    group = saying(THOUGHT)
    router = await start_http_router(group, tokenizer=thinker)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    call = '[{"name": "weather", "arguments": {"city": "Bonn"}}]'
    for options, answer in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}, '{"a": 1}'),
        ({"structured_outputs": {"regex": "a+b"}}, "aab"),
        ({"tools": [WEATHER], "tool_choice": "required"}, call),
    ):
        body = {"messages": HELLO, **options}
        assert (await router.request("POST", "/v1/chat/completions", body))[0] == 200
        grammar = Grammar.from_message(group.submits[-1].sampling.structured)
        assert allows(grammar, f"<think>\nhm {{\n</think>\n\n{answer}") and allows(grammar, answer)
        assert not allows(grammar, f"<think>\nhm\n</think>\n\nso{answer}") and not allows(grammar, "hm")
        body |= {"chat_template_kwargs": {"enable_thinking": False}}
        assert (await router.request("POST", "/v1/chat/completions", body))[0] == 200
        closed = Grammar.from_message(group.submits[-1].sampling.structured)
        assert allows(closed, answer) and not allows(closed, f"<think>\nhm\n</think>\n\n{answer}")


async def test_history_may_have_what_servers_send(start_http_router: StartHttpRouter, thinker: TokenizerJson) -> None:
    """Reasoning of earlier messages reaches the template. Fields that cannot change the answer are taken."""
    router = await start_http_router(saying("yes"), tokenizer=thinker)
    parts = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    calls = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed": None}}]
    history = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "annotations": [{"a": 1}], "audio": None},
        {"role": "assistant", "content": "", "tool_calls": calls, "provider_specific_fields": {"a": 1}},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    body = {
        "messages": history, "store": True, "reasoning_effort": "low", "chat_template_kwargs": {"no_such_variable": 1},
    }  # fmt: skip
    status, _, text = await router.request("POST", "/v1/chat/completions", body)
    assert status == 200, text
    ids = list(router.groups[0].submits[-1].prompt_token_ids)
    prompt = json.loads((await router.request("POST", "/detokenize", {"tokens": ids}))[2])["prompt"]
    assert "<think>hm</think>so" in prompt


PLANNED = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_large_template_arguments_are_not_kept(tmp_path: Path) -> None:
    """Each set of arguments has its own result, and those of many megabytes leave no trace of their size."""
    planner = OutputPlanner(TokenizerJson.load(str(write_model(tmp_path, PLANNED))))
    for number in range(100):
        planner.reasoning_start({"unused": f"{number}" + "x" * 10_000}, begins_message=True)
    closed = planner.reasoning_start({"enable_thinking": False}, begins_message=True)
    assert closed is ReasoningStart.CLOSED
    assert planner.reasoning_start({}, begins_message=True) is ReasoningStart.UNDECIDED
    assert measure_bytes(list(planner._starts)) < 100_000 and len(planner._starts) <= 64


async def test_a_limit_on_reasoning_reaches_the_group(
    start_http_router: StartHttpRouter, thinker: TokenizerJson
) -> None:
    """Groups get the limit in tokens of the markers: after a start marker unless the prompt has opened the reasoning,
    and none if the prompt has closed it. Every API has a name for the limit. -1 means no limit, as in vLLM."""
    group = saying("yes")
    router = await start_http_router(group, tokenizer=thinker)
    start, end = (tuple(thinker.encode(marker, False)) for marker in ("<think>", "</think>"))
    asked: dict[str, Any] = dict(model="tiny", messages=HELLO)
    create = router.openai.chat.completions.create

    def sent() -> ReasoningLimit | None:
        return SamplingParams.from_message(group.submits[-1].sampling).reasoning_limit

    await create(**asked, extra_body={"max_reasoning_tokens": 5})
    assert sent() == ReasoningLimit(5, start, end)
    await create(**asked, extra_body={"thinking_token_budget": 5, "truncate_prompt_tokens": 9}, reasoning_effort="high")
    assert sent() == ReasoningLimit(5, (), end)
    closed = {"max_reasoning_tokens": 5, "chat_template_kwargs": {"enable_thinking": False}}
    await create(**asked, extra_body=closed)
    assert sent() is None
    await create(**asked)
    assert sent() is None
    thinking = {"type": "enabled", "budget_tokens": 7}
    for name in ("max_reasoning_tokens", "thinking_token_budget", "thinking_budget"):
        await create(**asked, extra_body={name: -1})
        assert sent() is None
        error = await router.expect_refusal("/v1/chat/completions", {**asked, name: -2})
        assert error["param"] == name and "-1" in error["message"], error
        await create(**asked, extra_body={name: -1, "reasoning": {"max_tokens": 6}, "thinking": thinking})
        assert sent() is None, "the body's own field says that there is no limit"
        await create(**asked, extra_body={name: None, "reasoning": {"max_tokens": 6}})
        assert sent() == ReasoningLimit(6, start, end)
    status, _, text = await router.request("POST", "/v1/responses", {"input": "hello", "max_reasoning_tokens": -1})
    assert (status, sent()) == (200, None), text
    for prompt, opening in (("a<think>b", ()), ("<think>a</think>b", start)):
        await router.openai.completions.create(model="tiny", prompt=prompt, extra_body={"max_reasoning_tokens": 0})
        assert sent() == ReasoningLimit(0, opening, end)
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO, "thinking": thinking}
    assert (await router.request("POST", "/v1/messages", body))[0] == 200
    assert sent() == ReasoningLimit(7, start, end)


async def test_bad_words_reach_the_group_as_tokens(start_http_router: StartHttpRouter, thinker: TokenizerJson) -> None:
    """Each text is sent as it is at the beginning of a text and behind a space; one that has too many tokens is
    refused."""
    group = saying("yes")
    router = await start_http_router(group, tokenizer=thinker)
    create = router.openai.chat.completions.create
    await create(model="tiny", messages=HELLO, extra_body={"bad_words": ["no", " no"], "max_tokens": 3})
    ids = SamplingParams.from_message(group.submits[-1].sampling).bad_token_ids
    assert ids == tuple(tuple(thinker.encode(text, False)) for text in ("no", " no"))
    await create(model="tiny", messages=HELLO, extra_body={"allowed_token_ids": [5, 6]})
    assert list(group.submits[-1].sampling.allowed_token_ids) == [5, 6]
    with pytest.raises(BadRequestError, match="bad_words has a text of .* tokens; the maximum is 64"):
        await create(model="tiny", messages=HELLO, extra_body={"bad_words": ["xyzzy" * 100]})


# How MiniMax M3's template begins an answer.
M3_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    "{% if thinking_mode is defined %}[{{ thinking_mode }}]{% if thinking_mode == 'enabled' %}<think>"
    "{% elif thinking_mode == 'disabled' %}</think>{% elif thinking_mode == 'adaptive' %}{% endif %}{% endif %}"
)


async def test_each_api_sets_the_template_s_own_switch(start_http_router: StartHttpRouter, tmp_path: Path) -> None:
    """Chat completions, Responses and Messages, for a template whose switch has a name and values of its own. The
    answer is parsed by what the prompt then ends with."""
    tokenizer = TokenizerJson.load(str(write_model(tmp_path, M3_TEMPLATE)))
    router = await start_http_router(saying("hm</think>yes"), tokenizer=tokenizer)
    chat, responses = {"messages": HELLO}, {"input": "hello"}
    messages = {"messages": HELLO, "max_tokens": 99}
    for path, body, mode in (
        ("/v1/chat/completions", {**chat, "reasoning_effort": "low"}, "enabled"),
        ("/v1/chat/completions", {**chat, "reasoning_effort": "none"}, "disabled"),
        ("/v1/chat/completions", {**chat, "thinking": {"type": "adaptive"}}, "adaptive"),
        ("/v1/chat/completions",
         {**chat, "reasoning_effort": "low", "chat_template_kwargs": {"thinking_mode": "disabled"}}, "disabled"),
        ("/v1/responses", {**responses, "reasoning": {"effort": "high"}}, "enabled"),
        ("/v1/responses", {**responses, "reasoning": {"effort": "none"}}, "disabled"),
        ("/v1/messages", {**messages, "thinking": {"type": "enabled", "budget_tokens": 50}}, "enabled"),
        ("/v1/messages", {**messages, "thinking": {"type": "disabled"}}, "disabled"),
        ("/v1/messages", {**messages, "thinking": {"type": "adaptive"}}, "adaptive"),
    ):  # fmt: skip
        status, _, text = await router.request("POST", path, {"model": "tiny", **body})
        assert status == 200, text
        ids = list(router.groups[0].submits[-1].prompt_token_ids)
        prompt = json.loads((await router.request("POST", "/detokenize", {"tokens": ids}))[2])["prompt"]
        assert f"[{mode}]" in prompt, (path, body, prompt)
        assert ("hm</think>yes" in text) == (mode != "enabled"), text
