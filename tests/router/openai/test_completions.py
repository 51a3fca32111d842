"""/v1/completions with OpenAI's own client, against scripted groups."""

import asyncio
import json
from typing import Any

import openai
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest, TokenIds
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import EOS, FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter


async def over_grpc(router: HttpRouter, **request: Any) -> Any:
    """The response to the same request by gRPC."""
    sampling = SamplingParams(**request.pop("sampling"))
    return await router.generation.Generate(GenerateRequest(sampling=sampling, **request))


async def test_an_answer_is_the_one_that_grpc_gives(start_http_router: StartHttpRouter) -> None:
    """The same prompt and seed give the same text over both protocols, whole and streamed, with its usage."""
    router = await start_http_router(FakeGroup(finds=4))
    wanted = await over_grpc(router, text="the quick fox", sampling=dict(max_tokens=12, seed=3))
    asked: dict[str, Any] = dict(model="tiny", prompt="the quick fox", max_tokens=12, seed=3)
    whole = await router.openai.completions.create(**asked)
    assert whole.choices[0].text == wanted.choices[0].text
    assert (whole.choices[0].finish_reason, whole.object, whole.model) == ("length", "text_completion", "tiny")
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    usage = wanted.final.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert whole.usage.prompt_tokens_details.cached_tokens == usage.cached_device_tokens == 2
    stream = await router.openai.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == wanted.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("length") == 1
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_max_tokens_is_sixteen_unless_told(start_http_router: StartHttpRouter) -> None:
    """As with OpenAI, a completion that names no max_tokens has sixteen."""
    router = await start_http_router(FakeGroup())
    answer = await router.openai.completions.create(model="tiny", prompt="a fox", seed=1)
    assert answer.usage is not None and answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_prompts_numbers_its_choices_through(start_http_router: StartHttpRouter, stream: bool) -> None:
    """Two prompts with two choices each give four choices, each equal to that of its prompt alone."""
    router = await start_http_router(FakeGroup())
    prompts = [[300, 301, 302], [400, 401]]
    wanted = []
    for ids in prompts:
        alone = await over_grpc(router, token_ids=TokenIds(ids=ids), sampling=dict(max_tokens=6, seed=9, n=2))
        wanted += [choice.text for choice in alone.choices]
    asked: dict[str, Any] = dict(model="tiny", prompt=prompts, max_tokens=6, seed=9, n=2)
    texts = dict.fromkeys(range(4), "")
    if stream:
        async for chunk in await router.openai.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = await router.openai.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage is not None and answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 24
    assert list(texts.values()) == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(start_http_router: StartHttpRouter, stream: bool) -> None:
    """The choice begins with the prompt, whose first token has no score; offsets and texts agree."""
    router = await start_http_router(FakeGroup(chunk=2))
    asked: dict[str, Any] = dict(model="tiny", prompt="the lazy dog", max_tokens=3, seed=1, echo=True, logprobs=1)
    if stream:
        parts = [chunk.choices[0] async for chunk in await router.openai.completions.create(**asked, stream=True)]
    else:
        parts = (await router.openai.completions.create(**asked)).choices
    text = "".join(part.text for part in parts)
    assert text.startswith("the lazy dog")
    scores = [score for part in parts if part.logprobs for score in part.logprobs.token_logprobs or []]
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens or []]
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset or []]
    prompt = len(tokens) - 3
    assert scores == [None] + [-2.0] * (prompt - 1) + [-1.0] * 3
    assert "".join(tokens[:prompt]) == "the lazy dog"
    assert offsets[:prompt] == [len("".join(tokens[:place])) for place in range(prompt)]


async def test_no_tokens_at_all_only_score(start_http_router: StartHttpRouter) -> None:
    """echo with max_tokens 0 is the prompt and its scores, as evaluation harnesses ask for them."""
    router = await start_http_router(FakeGroup())
    answer = await router.openai.completions.create(model="tiny", prompt="the dog", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("the dog", "length")
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "the dog"
    assert answer.usage is not None and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text(start_http_router: StartHttpRouter, include: bool) -> None:
    """The text ends before the stop string, or with include_stop_str_in_output after it; stop_reason is the stop
    string."""
    ids = ids_of("the quick brown fox")
    router = await start_http_router(FakeGroup(token=lambda submit, choice, position: ids[position % len(ids)]))
    extra = {"include_stop_str_in_output": include}
    asked: dict[str, Any] = dict(model="tiny", prompt="x", stop=["brown"], max_tokens=30, extra_body=extra)
    (choice,) = (await router.openai.completions.create(**asked)).choices
    assert choice.text == "the quick " + ("brown" if include else "")
    assert choice.finish_reason == "stop" and choice.to_dict()["stop_reason"] == "brown"
    streamed = [chunk.choices[0].text async for chunk in await router.openai.completions.create(**asked, stream=True)]
    assert "".join(streamed) == choice.text


async def test_every_field_reaches_the_group(start_http_router: StartHttpRouter) -> None:
    """OpenAI's fields and those of other engines arrive as the contract names them."""
    group = FakeGroup()
    router = await start_http_router(group)
    await router.openai.completions.create(
        model="tiny", prompt=[300], max_tokens=4, temperature=0.5, top_p=0.9, presence_penalty=0.25, seed=-1,
        frequency_penalty=-0.5, logit_bias={"7": 2.0}, user="me",  # type: ignore[dict-item]
        extra_body=dict(
            top_k=-1, min_p=0.125, repetition_penalty=1.5, ignore_eos=True, min_tokens=2, stop_token_ids=[9],
            cache_salt="tenant", priority=-3, request_id="mine", metadata={"a": "b"}, store=False,
        ),
    )  # fmt: skip
    (submit,) = group.submits
    sampling = submit.sampling
    assert (sampling.temperature, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25, -0.5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.125, 1.5)
    assert (sampling.ignore_eos, sampling.min_tokens, list(sampling.stop_token_ids)) == (True, 2, [9])
    assert (dict(sampling.logit_bias), sampling.seed) == ({7: 2.0}, 2**64 - 1)
    assert (submit.cache_salt, submit.priority, round(sampling.top_p, 3)) == ("tenant", -3, 0.9)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_session_keeps_to_its_group(start_http_router: StartHttpRouter, path: str) -> None:
    """Among groups of equal cost all requests of a session go to the same group, and the sessions go to all groups."""
    groups = [FakeGroup("a"), FakeGroup("b")]
    router = await start_http_router(*groups)
    prompt: dict[str, Any] = {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    homes = set()
    for session in ("s1", "s2", "s3", "s4"):
        before = [len(group.submits) for group in groups]
        for _ in range(3):
            await costs_are_equal(router)
            status, _, text = await router.request("POST", path, {**prompt, "max_tokens": 1, "session_id": session})
            assert status == 200, text
        gained = [len(group.submits) - count for group, count in zip(groups, before, strict=True)]
        assert sorted(gained) == [0, 3]
        homes.add(gained.index(3))
    assert homes == {0, 1}


async def costs_are_equal(router: HttpRouter) -> None:
    """Waits for the first load reports of both groups, and until the group that had the last request costs no more
    than the other. A group costs less before its first report, because the duration of its steps is unknown."""
    one, other = router.server.groups.connections

    def are_equal() -> bool:
        have_reported = all(group.load.last_report.HasField("status") for group in (one, other))
        return have_reported and one.load.candidate("") == other.load.candidate("")

    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not are_equal():
            await router.admin.Status(StatusRequest())


async def test_token_ids_come_back_when_asked_for(start_http_router: StartHttpRouter) -> None:
    """return_token_ids gives the prompt's and each choice's ids."""
    router = await start_http_router(FakeGroup())
    wanted = await over_grpc(router, text="a fox", sampling=dict(max_tokens=5, seed=2))
    extra = {"return_token_ids": True}
    answer = await router.openai.completions.create(
        model="tiny", prompt="a fox", max_tokens=5, seed=2, extra_body=extra
    )
    (choice,) = answer.to_dict()["choices"]  # type: ignore[misc]  # extensions are not in the client's types
    assert choice["token_ids"] == list(wanted.choices[0].token_ids)  # type: ignore[has-type]
    _, _, text = await router.request("POST", "/tokenize", {"prompt": "a fox"})
    assert choice["prompt_token_ids"] == json.loads(text)["tokens"]  # type: ignore[has-type]


async def test_end_of_sequence_is_stop(start_http_router: StartHttpRouter) -> None:
    """A choice that ends with an end-of-sequence token has finish_reason stop, and the token has no text."""
    router = await start_http_router(FakeGroup(token=lambda submit, choice, position: 300 if position < 2 else EOS))
    (choice,) = (await router.openai.completions.create(model="tiny", prompt="a")).choices
    assert choice.finish_reason == "stop" and "</s>" not in choice.text


async def test_a_stream_survives_its_group(start_http_router: StartHttpRouter) -> None:
    """A group dies during a stream; the client gets the same text as without the loss."""
    first, second = FakeGroup("a", hold_after=5), FakeGroup("b")
    router = await start_http_router(first)
    asked: dict[str, Any] = dict(model="tiny", prompt="a fox", max_tokens=10, seed=4)
    stream = await router.openai.completions.create(**asked, stream=True)
    text = (await anext(stream)).choices[0].text
    router.groups.append(second)
    await router.server.set_groups(
        [*[link.endpoint for link in router.server.groups.connections], await second.start()]
    )
    await router.wait_for_groups(2)
    await first.kill()
    async for chunk in stream:
        text += chunk.choices[0].text
    assert text == (await router.openai.completions.create(**asked)).choices[0].text


async def test_a_client_that_vanishes_frees_its_blocks(start_http_router: StartHttpRouter) -> None:
    """A client that closes its stream, or disconnects before a whole answer, has its request aborted at the group."""
    group = FakeGroup(token=lambda submit, choice, position: 300, hold_after=2)
    router = await start_http_router(group)
    stream = await router.openai.completions.create(model="tiny", prompt="a", stream=True)
    await anext(stream)
    await stream.close()
    await group.until(lambda: len(group.aborts) == 1)
    asking = asyncio.create_task(router.openai.completions.create(model="tiny", prompt="a"))
    await group.until(lambda: len(group.submits) == 2)
    asking.cancel()
    await group.until(lambda: len(group.aborts) == 2)
    assert router.server.traffic.active == 0


async def test_a_refusal_amid_a_stream_is_its_last_event(start_http_router: StartHttpRouter) -> None:
    """If a group refuses a request whose stream has begun, the client gets an error event and not a normal end."""
    router = await start_http_router(FakeGroup(refuse=(8, "the queue is full")), max_queued=0)
    stream = await router.openai.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="no group has room"):
        [chunk async for chunk in stream]
    with pytest.raises(openai.RateLimitError, match="no group has room") as refused:
        await router.openai.completions.create(model="tiny", prompt="a")
    assert refused.value.response.headers["retry-after"] == "1"


def ids_of(text: str) -> list[int]:
    """The token ids of a text."""
    from tests.router.tiny_tokenizer import byte_level_tokenizer

    ids: list[int] = TokenizerJson(byte_level_tokenizer(), None).encode(text)
    return ids


@pytest.mark.parametrize("chat", [False, True])
async def test_each_chunk_can_say_what_was_taken(start_http_router: StartHttpRouter, chat: bool) -> None:
    """With continuous_usage_stats, as load generators send it, each chunk's counts are at least those of the chunk
    before, and the last are the total."""
    router = await start_http_router(FakeGroup())
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "n": 2, "stream": True, "stream_options": options}
    stream: Any
    if chat:
        stream = await router.openai.chat.completions.create(**asked, messages=[{"role": "user", "content": "a"}])
    else:
        stream = await router.openai.completions.create(**asked, prompt=["the lazy dog", "the"])
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and counts[-2:] == [counts[-1]] * 2 and counts[-1] == (8 if chat else 16)
    assert usages[-2].prompt_tokens == usages[-1].prompt_tokens and usages[-2].total_tokens == usages[-1].total_tokens


OUT_OF_PLACE: dict[str, tuple[list[Any], str]] = {
    "true among ids": ([5, True], "item 1 is true"),
    "true first": ([True, 5], "item 0 is true"),
    "false alone": ([False], "item 0 is false"),
    "a fraction of nothing": ([5, 5.0], "item 1 is 5.0"),
    "fractions alone": ([5.0], "item 0 is 5.0"),
    "a text among ids": ([5, 6, "7"], 'item 2 is "7"'),
    "an id among texts": (["a", 7], "item 1 is 7"),
    "null": ([5, None], "item 1 is null"),
    "a list among ids": ([5, [6]], "item 1 is a list"),
    "an id among lists": ([[5], 6], "item 1 is 6"),
    "true in a list": ([[5, 6], [7, 8, True]], "item 1.2 is true"),
    "a text in a list": ([[5], ["6"]], 'item 1.0 is "6"'),
    "a list in a list": ([[5], [[6]]], "item 1.0 is a list"),
    "an object": ([{"id": 5}], "item 0 is an object"),
    "a long text": ([5, "a" * 1000], 'item 1 is "aaa'),
}


@pytest.mark.parametrize("case", OUT_OF_PLACE)
async def test_what_is_no_token_id_is_refused_by_its_place(start_http_router: StartHttpRouter, case: str) -> None:
    """Booleans, fractions, texts and lists among token ids, and ids among texts, are refused before a group gets
    them."""
    prompt, words = OUT_OF_PLACE[case]
    group = FakeGroup()
    router = await start_http_router(group)
    error = await router.expect_refusal("/v1/completions", {"prompt": prompt})
    assert error["message"].startswith(f"prompt: {words}") and error["param"] == "prompt", error
    assert len(error["message"]) < 300 and not group.submits


async def test_other_lists_of_token_ids_hold_whole_numbers_alone(start_http_router: StartHttpRouter) -> None:
    """stop_token_ids and the tokens of /detokenize accept only whole numbers."""
    router = await start_http_router(FakeGroup())
    for path, body in (
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5, True]}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5.0]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": ["5"]}),
    ):
        assert "valid integer" in (await router.expect_refusal(path, body))["message"]
