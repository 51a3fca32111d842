"""Our Python client: tools, reasoning, embeddings and scores over gRPC."""

import asyncio
from typing import Any

import pytest

from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.results import ToolCall
from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import FakeGroup, fake_embedding
from tests.router.openai.scripted_chat import HELLO, TOOL_TEMPLATE, WEATHER, saying, tokens_until
from tests.router.router_under_test import StartRouter
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A model that reasons and calls tools."""
    template = TOOL_TEMPLATE + "{# </think> #}"
    return TokenizerJson.load(str(write_model(tmp_path_factory.mktemp("model"), template)))


async def test_tools_and_reasoning(start_router: StartRouter, model: TokenizerJson) -> None:
    """With tools the answer has its calls and its reasoning in fields of their own, whole and streamed."""
    router = await start_router(saying(f"<think>hm</think>so{CALL}{CALL}"), tokenizer=model)
    async with AsyncClient(f"127.0.0.1:{router.port}") as client:
        options: Any = {"tools": [WEATHER], "max_tokens": 200, "template_arguments": {"x": 1}}
        whole = await client.chat(HELLO, **options)
        assert (whole.text, whole.choices[0].reasoning, whole.finish_reason) == ("so", "hm", "stop")
        assert [(call.name, call.arguments) for call in whole.tool_calls] == [("weather", '{"city": "Bonn"}')] * 2
        assert [call["name"] for call in whole.to_json()["tool_calls"]] == ["weather"] * 2
        group = router.groups[0]
        group.go(tokens_until(f"<think>hm</think>so{CALL}", '"city":'))
        pieces: list[ToolCall] = []
        async with client.stream_chat(HELLO, **options) as stream:
            async for chunk in stream:
                pieces += chunk.tool_calls
                if chunk.tool_calls:
                    group.go()
        assert len(pieces) > 2 and stream.result.tool_calls[1].arguments == '{"city": "Bonn"}'
        assert "<tool_call>" in (await client.chat(HELLO, **options, split_output=False)).text
        await client.chat(HELLO, **options, tool_choice="required")
        assert router.groups[0].submits[-1].sampling.HasField("structured")


async def test_embeddings_and_scores(start_router: StartRouter, model: TokenizerJson) -> None:
    """One embedding for each text or list of ids; scores are cosines."""
    router = await start_router(FakeGroup(), tokenizer=model)
    ids = byte_level_tokenizer().encode("hello world").ids
    async with AsyncClient(f"127.0.0.1:{router.port}") as client:
        prompts: list[Any] = ["hello world", ids]
        raw = await client.embed(prompts, pooling="mean", normalize=False, dimensions=8)
        assert raw == [fake_embedding(ids, pb.POOLING_MEAN)[:8]] * 2
        assert await client.embed("hello world") == await client.embed(ids)
        assert await client.embed([]) == []
        same, other = await client.score("hello world", ["hello world", "one two three"])
        assert same == pytest.approx(1.0) and other < same


async def test_many_prompts_are_embedded_64_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with more prompts than a router lets wait does not overload the router."""
    running = peak = 0

    async def call(self: AsyncClient, stub: object, method: str, request: pb.EmbedRequest, timeout: object) -> Any:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)  # every call that may start has started when the first ends
        running -= 1
        return pb.EmbedResponse(embedding=[float(request.text)])

    monkeypatch.setattr(AsyncClient, "_call", call)
    async with AsyncClient("127.0.0.1:1") as client:
        assert await client.embed([str(place) for place in range(200)]) == [[float(place)] for place in range(200)]
    assert (peak, running) == (64, 0)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"prompt": "a", "tools": [WEATHER]}, "tools is for conversations; call chat or stream_chat"),
    ("chat", {"messages": HELLO, "tools": "f"}, "tools must be a list of functions"),
    ("chat", {"messages": HELLO, "tool_choice": 5}, "an option of the conversation has a wrong type"),
    ("embed", {"prompts": "a", "pooling": "max"}, "pooling is 'max'; it must be 'last', 'mean' or None"),
    ("embed", {"prompts": "a", "dimensions": "4"}, "dimensions is '4'; it must be a whole number from 1"),
    ("embed", {"prompts": [None]}, "a prompt must be one text"),
    ("embed", {"prompts": None}, "embed takes one or a list of them, and got NoneType"),
    ("embed", {"prompts": {"a": 1}}, "embed takes one or a list of them, and got dict"),
    ("embed", {"prompts": "a", "normalize": "no"}, "normalize is 'no'; it must be True or False"),
    ("embed", {"prompts": "a", "cache_salt": 3}, "cache_salt is 3; it must be a text"),
    ("score", {"text": "a", "others": "bc"}, r"others is one prompt; give a list of prompts: \['bc'\]"),
    ("score", {"text": "a", "others": [1, 2]}, "others is one prompt; give a list of prompts"),
]


async def test_wrong_arguments_say_what_to_change() -> None:
    """Nothing is sent for them."""
    async with AsyncClient("127.0.0.1:1") as client:
        for method, arguments, words in WRONG:
            with pytest.raises(InvalidRequest, match=words):
                await getattr(client, method)(**arguments)
