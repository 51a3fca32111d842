"""The public service, end to end: a real client, a real router, a scripted group."""

import asyncio

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateEvent,
    GenerateRequest,
    GetModelRequest,
    Resumed,
    Retention,
    SamplingParams,
    StatusRequest,
    TokenIds,
    TokenizeRequest,
)
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import EOS, FakeGroup
from tests.router.router_under_test import StartRouter


def ask(text: str = "hello there, fox", **sampling: object) -> GenerateRequest:
    """A request with a seed, so that its tokens are known."""
    return GenerateRequest(text=text, sampling=SamplingParams(**{"max_tokens": 20, "seed": 7, **sampling}))  # type: ignore[arg-type]


async def test_a_stream_starts_flows_and_ends(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """Started comes first, then deltas whose text is the decoded tokens, then one Final with usage by tier."""
    group = FakeGroup(finds=4)
    router = await start_router(group)
    events: list[GenerateEvent] = [event async for event in router.generation.GenerateStream(ask())]
    started, *deltas, final = events
    assert started.started.seed == 7 and started.started.group == "g0" and started.started.request_id
    token_ids = [token for event in deltas for token in event.delta.token_ids]
    assert token_ids == [group.token(group.submits[0], 0, position) for position in range(20)]
    assert "".join(event.delta.text for event in deltas) == tokenizer.decode(token_ids)
    assert deltas[-1].delta.finish_reason == FINISH_REASON_LENGTH
    usage = final.final.usage
    assert (usage.completion_tokens, usage.cached_device_tokens) == (20, 4)
    assert usage.prompt_tokens == started.started.prompt_tokens == len(tokenizer.encode("hello there, fox"))
    assert final.final.group == "g0" and "g0" in final.final.routed_by


async def test_a_whole_answer_is_the_stream_joined(start_router: StartRouter) -> None:
    """Generate returns what GenerateStream streams, per choice and in order."""
    router = await start_router(FakeGroup())
    request = ask(n=3, logprobs=0, prompt_logprobs=0)
    whole = await router.generation.Generate(request)
    texts = ["", "", ""]
    tokens: list[list[int]] = [[], [], []]
    async for event in router.generation.GenerateStream(request):
        if event.HasField("delta"):
            texts[event.delta.choice] += event.delta.text
            tokens[event.delta.choice] += event.delta.token_ids
    assert [choice.text for choice in whole.choices] == texts
    assert [list(choice.token_ids) for choice in whole.choices] == tokens
    assert all(len(choice.logprobs) == 20 for choice in whole.choices)
    assert len(whole.prompt_logprobs.tokens) == whole.started.prompt_tokens - 1
    assert [end.completion_tokens for end in whole.final.choices] == [20, 20, 20]


async def test_a_missing_seed_is_drawn_and_sent(start_router: StartRouter) -> None:
    """Without a seed the router draws one, tells the client, and the group gets the same."""
    group = FakeGroup()
    router = await start_router(group)
    whole = await router.generation.Generate(GenerateRequest(text="a fox", sampling=SamplingParams(max_tokens=2)))
    assert group.submits[0].sampling.seed == whole.started.seed


async def test_a_retention_reaches_the_group(start_router: StartRouter) -> None:
    """A retention is sent to the group with its time filled in; a request without one has none."""
    group = FakeGroup()
    router = await start_router(group)
    await router.generation.Generate(GenerateRequest(text="a fox", retention=Retention(priority=7)))
    await router.generation.Generate(GenerateRequest(text="a fox"))
    assert group.submits[0].retention == Retention(priority=7, ttl_seconds=300)
    assert not group.submits[1].HasField("retention")


async def test_max_tokens_defaults_to_what_the_context_holds(start_router: StartRouter) -> None:
    """Unset max_tokens becomes the model's context, or the pool where that is smaller, less the prompt."""
    group = FakeGroup(num_blocks=8)  # 32 tokens
    router = await start_router(group)
    whole = await router.generation.Generate(GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7])))
    assert group.submits[0].sampling.max_tokens == whole.final.usage.completion_tokens == 29


async def test_an_end_token_is_delivered_but_not_shown(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """The end-of-sequence token is among the token ids and named as what stopped it; its text is not emitted."""
    group = FakeGroup(token=lambda submit, choice, position: EOS if position == 3 else 300 + position)
    router = await start_router(group)
    whole = await router.generation.Generate(ask(skip_special_tokens=False))
    (choice,) = whole.choices
    assert list(choice.token_ids) == [300, 301, 302, EOS]
    assert (choice.finish_reason, choice.stop_token_id) == (FINISH_REASON_STOP, EOS)
    assert choice.text == tokenizer.decode([300, 301, 302])


async def test_a_stop_token_is_shown(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """A stop token that is no end-of-sequence token is included, in the ids and in the text."""
    group = FakeGroup(token=lambda submit, choice, position: 300 + position)
    router = await start_router(group)
    whole = await router.generation.Generate(ask(stop_token_ids=[302]))
    assert whole.choices[0].text == tokenizer.decode([300, 301, 302])
    assert whole.choices[0].stop_token_id == 302


async def test_a_stop_string_ends_the_choice_and_aborts_it(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """Text ends before the stop string, ids end with the token that completed it, and the group is told to stop."""
    words = tokenizer.encode("the quick brown fox jumps over the lazy dog, and the dog does not mind at all")
    group = FakeGroup(token=lambda submit, choice, position: words[position % len(words)])
    router = await start_router(group)
    whole = await router.generation.Generate(ask(stop=["lazy d", "nowhere"], max_tokens=200))
    (choice,) = whole.choices
    assert choice.text == "the quick brown fox jumps over the "
    assert (choice.finish_reason, choice.stop) == (FINISH_REASON_STOP, "lazy d")
    shown = tokenizer.decode(choice.token_ids)
    assert "lazy d" in shown and "lazy d" not in tokenizer.decode(choice.token_ids[:-1])
    await group.until(lambda: bool(group.aborts))
    assert (group.aborts[0].id, group.aborts[0].choice) == (group.submits[0].id, 0)
    assert not group.submits[0].sampling.stop


async def test_a_chat_goes_through_the_models_template(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """The group gets the template's text as ids, without special tokens added on top."""
    group = FakeGroup()
    router = await start_router(group)
    chat = Chat(messages=[ChatMessage(role="user", content="hello")])
    await router.generation.Generate(GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=1)))
    expected = tokenizer.encode("<|user|>hello</s><|assistant|>", add_special_tokens=False)
    assert list(group.submits[0].prompt_token_ids) == expected
    tokens = await router.generation.Tokenize(TokenizeRequest(chat=chat))
    assert list(tokens.token_ids) == expected


async def test_text_survives_tokenize_and_detokenize(start_router: StartRouter) -> None:
    """Tokenize and Detokenize undo each other, without any group."""
    router = await start_router()
    text = "naïve 🙂 漢字, and the dog"
    tokens = await router.generation.Tokenize(TokenizeRequest(text=text))
    back = await router.generation.Detokenize(DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == text


async def test_the_model_describes_itself(start_router: StartRouter) -> None:
    """GetModel gives what the group registered, under the name that clients use."""
    group = FakeGroup()
    group.model.name = "coat"
    router = await start_router(group, served_model_name="coat")
    model = await router.generation.GetModel(GetModelRequest())
    assert (model.name, model.vocab_size, model.block_size, model.fingerprint) == ("coat", 600, 4, "weights")


@pytest.mark.parametrize("delivered", [0, 1, 5, 19])
async def test_a_resumed_request_gives_only_the_rest(start_router: StartRouter, delivered: int) -> None:
    """With its seed and the ids it has, a client that lost its router gets the same stream from where it broke."""
    group = FakeGroup()
    router = await start_router(group)
    ids: list[int] = []
    texts: list[tuple[int, str]] = []
    async for event in router.generation.GenerateStream(ask(stop=["zzzz"])):
        if event.HasField("delta"):
            ids += event.delta.token_ids
            texts.append((len(ids), event.delta.text))
    # A delta may hold several tokens: what the client had is known at the ends of deltas.
    had = max((count for count, _ in texts if count <= delivered), default=0)
    request = ask(stop=["zzzz"])
    request.resume.append(Resumed(choice=0, token_ids=ids[:had]))
    rest = await router.generation.Generate(request)
    assert list(rest.choices[0].token_ids) == ids[had:]
    assert rest.choices[0].text == "".join(text for count, text in texts if count > had)
    assert rest.final.usage.completion_tokens == 20


async def test_a_resume_that_holds_the_stop_string_is_over(start_router: StartRouter, tokenizer: TokenizerJson) -> None:
    """Delivered tokens that already complete a stop string leave nothing to generate but the end."""
    group = FakeGroup(hold_after=0)
    router = await start_router(group)
    request = ask(stop=["fox"])
    request.resume.append(Resumed(choice=0, token_ids=tokenizer.encode("the quick brown fox")))
    whole = await router.generation.Generate(request)
    assert (whole.choices[0].text, whole.choices[0].stop) == ("", "fox")


async def test_cancel_reaches_the_group(start_router: StartRouter) -> None:
    """When a client cancels, the group is told to abort."""
    group = FakeGroup(hold_after=3)
    router = await start_router(group)
    call = router.generation.GenerateStream(ask())
    await call.read()
    await call.read()
    call.cancel()
    await group.until(lambda: bool(group.aborts))
    assert group.aborts[0].id == group.submits[0].id and not group.aborts[0].HasField("choice")
    await router.server.traffic.wait_until_idle()


async def test_a_deadline_reaches_the_group(start_router: StartRouter) -> None:
    """A request that runs out of time is aborted on the group, for the unary call too."""
    group = FakeGroup(hold_after=3)
    router = await start_router(group)
    seconds = 0.3
    while not group.submits:  # on a busy machine time may run out before the group hears of the request
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.generation.Generate(ask(), timeout=seconds)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        seconds *= 4
    await group.until(lambda: bool(group.aborts))


async def test_a_disconnect_reaches_the_group(start_router: StartRouter) -> None:
    """When a client's connection breaks, the group is told to abort."""
    group = FakeGroup(hold_after=3)
    router = await start_router(group)
    call = router.generation.GenerateStream(ask())
    await call.read()
    await group.until(lambda: bool(group.submits))
    await router.channel.close()  # type: ignore[call-arg]
    await group.until(lambda: bool(group.aborts))


async def test_a_slow_reader_gets_fewer_and_larger_deltas(start_router: StartRouter) -> None:
    """Tokens that wait for a reader are delivered together."""
    group = FakeGroup(hold_after=1)
    router = await start_router(group)
    events = router.server.generation.generate_stream(ask(max_tokens=100))
    assert (await anext(events)).HasField("started")
    assert len((await anext(events)).delta.token_ids) == 1
    group.go()
    await group.until(lambda: group.sent == 100)  # the reader is away until all have come
    group.report(waiting=1)
    (connection,) = router.server.groups.connections
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while connection.load.last_report.status.waiting != 1:  # which came behind them
            await router.admin.Status(StatusRequest())
    sizes = [len(event.delta.token_ids) async for event in events if event.HasField("delta")]
    assert sum(sizes) == 99 and len(sizes) < 20
