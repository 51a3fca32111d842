"""Invalid requests: each gets its status and a message that says what to change, and has no other effect."""

import math
import random
from pathlib import Path

import grpc
import pytest

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GetModelRequest,
    Resumed,
    Retention,
    SamplingParams,
    StatusRequest,
    TokenIds,
    TokenizeRequest,
)
from coatcheck.router.serving.request_validation import prompt_token_ids
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import VOCAB, FakeGroup
from tests.router.router_under_test import StartRouter
from tests.router.tiny_tokenizer import byte_level_tokenizer


def sampled(**sampling: object) -> GenerateRequest:
    """A valid prompt with these sampling parameters."""
    return GenerateRequest(text="a fox", sampling=SamplingParams(**sampling))  # type: ignore[arg-type]  # by name


def resumed(*parts: Resumed, **sampling: object) -> GenerateRequest:
    """A valid prompt with these resumed choices."""
    return GenerateRequest(text="a fox", resume=parts, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


HUGE = TokenIds(ids=[5] * 300)
BAD = {
    "no prompt": (GenerateRequest(), "no prompt"),
    "empty text": (GenerateRequest(text=""), "prompt is empty"),
    "no ids": (GenerateRequest(token_ids=TokenIds()), "prompt is empty"),
    "no messages": (GenerateRequest(chat=Chat()), "no messages"),
    "unknown role": (GenerateRequest(chat=Chat(messages=[ChatMessage(role="bard", content="x")])), "unknown role bard"),
    "id outside": (GenerateRequest(token_ids=TokenIds(ids=[3, VOCAB])), f"below {VOCAB}"),
    "prompt over model": (GenerateRequest(token_ids=HUGE), "Shorten it to at most 255"),
    "prompt fills model": (GenerateRequest(token_ids=TokenIds(ids=[5] * 256)), "the prompt has 256. Shorten it"),
    "max_tokens 0": (sampled(max_tokens=0), "max_tokens is 0"),
    "max_tokens over room": (sampled(max_tokens=255), "and max_tokens is 255. Lower max_tokens to 25"),
    "min over max": (sampled(max_tokens=2, min_tokens=3), "min_tokens is 3"),
    "min over room": (sampled(min_tokens=255), "min_tokens is 255"),
    "negative temperature": (sampled(temperature=-1.0), "temperature is -1.0"),
    "temperature NaN": (sampled(temperature=math.nan), "temperature is nan"),
    "top_p 0": (sampled(top_p=0.0), "top_p"),
    "top_p over 1": (sampled(top_p=1.5), "top_p"),
    "min_p NaN": (sampled(min_p=math.nan), "min_p"),
    "repetition 0": (sampled(repetition_penalty=0.0), "repetition_penalty"),
    "presence": (sampled(presence_penalty=3.0), "presence_penalty"),
    "n 0": (sampled(n=0), "n is 0"),
    "n too large": (sampled(n=65), "n is 65"),
    "logprobs": (sampled(logprobs=21), "logprobs"),
    "all logprobs": (
        sampled(logprobs=-1),
        "is -1; on this server (--max-logprobs 20) it must be from 0 to 20",
    ),
    "all logprobs of the prompt": (sampled(prompt_logprobs=-1), "prompt_logprobs is -1"),
    "logprobs below all": (sampled(logprobs=-2), "logprobs is -2"),
    "logprob ids alone": (sampled(logprob_token_ids=[5]), "logprob_token_ids needs logprobs"),
    "logprob id outside": (sampled(logprobs=0, logprob_token_ids=[VOCAB]), "logprob_token_ids entry is 600"),
    "many logprob ids": (sampled(logprobs=0, logprob_token_ids=[5] * 129), "logprob_token_ids has 129 ids"),
    "empty stop": (sampled(stop=[""]), "stop"),
    "long stop": (sampled(stop=["a" * 1025]), "stop has 1025 characters in one string; the maximum is 1024"),
    "long request id": (GenerateRequest(text="a", request_id="r" * 257), "request_id has 257 characters"),
    "long salt": (GenerateRequest(text="a", cache_salt="s" * 257), "cache_salt has 257 characters"),
    "long session": (GenerateRequest(text="a", session_id="s" * 257), "session_id has 257 characters"),
    "retention over": (GenerateRequest(text="a", retention=Retention(priority=101)), "retention.priority is 101"),
    "retention of nothing": (GenerateRequest(text="a", retention=Retention()), "retention has no priority"),
    "retention too long": (
        GenerateRequest(text="a", retention=Retention(priority=1, ttl_seconds=1e6)),
        "retention.ttl_seconds",
    ),
    "text far over model": (GenerateRequest(text="ab " * 10000), "far more than 256 tokens"),
    "too many stops": (sampled(stop=["a"] * 17), "stop has 17 strings; the maximum is 16"),
    "stop token outside": (sampled(stop_token_ids=[VOCAB]), "stop_token_ids"),
    "bias outside": (sampled(logit_bias={VOCAB: 1.0}), "logit_bias"),
    "bias infinite": (sampled(logit_bias={3: math.inf}), "logit_bias"),
    "resume of no choice": (resumed(Resumed(choice=1, token_ids=[5]), seed=1), "resume names choice 1"),
    "resume twice": (resumed(Resumed(token_ids=[5]), Resumed(token_ids=[6]), seed=1), "twice"),
    "resume without seed": (resumed(Resumed(token_ids=[5])), "needs its seed"),
    "resume outside": (resumed(Resumed(token_ids=[VOCAB]), seed=1), "outside the vocabulary"),
    "resume over max": (resumed(Resumed(token_ids=[5, 6, 7]), seed=1, max_tokens=2), "more than max_tokens"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_say_what_to_change(start_router: StartRouter, case: str) -> None:
    """A wrong request is INVALID_ARGUMENT in both calls, and reaches no group."""
    request, words = BAD[case]
    group = FakeGroup()
    router = await start_router(group)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (refused.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.GenerateStream(request).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not group.submits and router.server.traffic.active == 0


async def test_a_prompt_over_every_pool_is_refused_at_once(start_router: StartRouter) -> None:
    """A prompt that no group can ever hold is refused and does not wait."""
    router = await start_router(FakeGroup(num_blocks=4))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(GenerateRequest(token_ids=TokenIds(ids=[5] * 16)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == (
        "This model's maximum context length is 16 tokens; the prompt has 16. Shorten it to at most 15 tokens"
    )


async def test_the_largest_group_says_how_long_a_prompt_may_be(start_router: StartRouter) -> None:
    """A prompt that fits one group is accepted, although a group that came later is smaller."""
    large, small = FakeGroup("a"), FakeGroup("b", num_blocks=4)
    small.model.max_model_len = 16
    router = await start_router(large)
    router.groups.append(small)
    address = next(iter(router.server.groups.connections)).endpoint
    await router.server.set_groups([address, await small.start()])
    await router.wait_for_groups(2)
    request = GenerateRequest(token_ids=TokenIds(ids=[5] * 32), sampling=SamplingParams(max_tokens=2))
    assert (await router.generation.Generate(request)).final.group == "a"


UNKNOWN = b"\xfa\x3e\x01x"  # field 1007, one byte of content


@pytest.mark.parametrize("where", ["request", "sampling", "message of a chat", "resume"])
async def test_unknown_fields_are_refused(start_router: StartRouter, where: str) -> None:
    """Unknown fields are refused at any depth."""
    router = await start_router(FakeGroup())
    parts = {
        "request": GenerateRequest(text="a fox").SerializeToString() + UNKNOWN,
        "sampling": GenerateRequest(text="a", sampling=SamplingParams.FromString(UNKNOWN)).SerializeToString(),
        "message of a chat": GenerateRequest(
            chat=Chat(messages=[ChatMessage.FromString(b"\x0a\x04user" + UNKNOWN)])
        ).SerializeToString(),
        "resume": GenerateRequest(text="a", resume=[Resumed.FromString(UNKNOWN)]).SerializeToString(),
    }
    call = router.channel.unary_unary("/coatcheck.v1.Generation/Generate")  # type: ignore[call-arg]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(parts[where])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1007" in (refused.value.details() or "")


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x1a\x02\xc3\x28"], ids=["no protobuf", "text that is no UTF-8"])
async def test_bytes_that_do_not_parse_are_the_clients_error(start_router: StartRouter, data: bytes) -> None:
    """A message that does not parse is INVALID_ARGUMENT and not INTERNAL."""
    router = await start_router(FakeGroup())
    call = router.channel.unary_unary("/coatcheck.v1.Generation/Generate")  # type: ignore[call-arg]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(data)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_mutated_requests_never_break_the_router(start_router: StartRouter) -> None:
    """Any bytes are answered or refused as the client's error, and no request stays open."""
    router = await start_router(FakeGroup())
    whole = GenerateRequest(
        text="a fox",
        sampling=SamplingParams(max_tokens=3, seed=1, n=2, stop=["x"], temperature=0.5, logit_bias={5: 1.0}),
        resume=[Resumed(choice=1, token_ids=[5, 6])],
    ).SerializeToString()
    dice = random.Random(7)
    call = router.channel.unary_unary("/coatcheck.v1.Generation/Generate")  # type: ignore[call-arg]
    seen = set()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            place = dice.randrange(len(data))
            data[place : place + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 2))
        try:
            await call(bytes(data))
            seen.add(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            seen.add(error.code())
    assert seen == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert router.server.traffic.active == 0
    router.server.groups.index.check()


async def test_another_model_is_not_found(start_router: StartRouter) -> None:
    """Another model's name is NOT_FOUND in every method that has the field, and the message names the served model."""
    router = await start_router(FakeGroup())
    for call in (
        router.generation.Generate(GenerateRequest(model="other", text="a")),
        router.generation.Tokenize(TokenizeRequest(model="other", text="a")),
        router.generation.Detokenize(DetokenizeRequest(model="other", token_ids=[5])),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'tiny'" in (refused.value.details() or "")


async def test_what_is_quoted_is_cut(start_router: StartRouter) -> None:
    """A refusal that quotes a very long field reaches the client with its status."""
    router = await start_router(FakeGroup())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(GenerateRequest(model="\U0001f98a" * 100_000, text="a"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert (refused.value.details() or "").startswith("The model '\U0001f98a")


async def test_a_chat_without_a_template_is_refused(start_router: StartRouter) -> None:
    """A model that has no chat template says so."""
    router = await start_router(FakeGroup(), tokenizer=TokenizerJson(byte_level_tokenizer(), template=None))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="x")])))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no chat template" in (refused.value.details() or "")


async def test_without_a_group_there_is_no_service(start_router: StartRouter) -> None:
    """No group is UNAVAILABLE, at once."""
    router = await start_router()
    for call in (
        router.generation.Generate(GenerateRequest(text="a fox")),
        router.generation.GetModel(GetModelRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_a_group_refuses_reaches_the_client(start_router: StartRouter) -> None:
    """A group's refusal keeps its code and message."""
    router = await start_router(FakeGroup(refuse=(3, "this cannot be")))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(GenerateRequest(text="a fox"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "this cannot be"


async def test_a_full_group_and_a_full_line_shed(start_router: StartRouter) -> None:
    """If the group and the queue are full, the client is told when to come again."""
    router = await start_router(FakeGroup(refuse=(8, "the queue is full")), max_queued=0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.generation.Generate(GenerateRequest(text="a fox"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no group has room" in (refused.value.details() or "")
    assert b"RetryInfo" in dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]  # type: ignore[arg-type, index]
    assert (await router.admin.Status(StatusRequest())).active_streams == 0


def test_an_empty_text_is_empty_whatever_the_tokenizer_adds() -> None:
    """An empty text is refused, although the tokenizer adds a token to every text."""
    tokenizer = TokenizerJson.load(str(Path(__file__).parents[2] / "demo" / "model"))
    assert prompt_token_ids(GenerateRequest(text="a"), tokenizer)[1:]
    with pytest.raises(InvalidRequest, match="empty"):
        prompt_token_ids(GenerateRequest(text=""), tokenizer)
