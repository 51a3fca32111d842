"""The blocking client: what a program without coroutines gets."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest

import coatcheck
from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.cluster.client.request_builder import SamplingOptions, build_sampling
from coatcheck.proto.errors import InvalidConfig, InvalidRequest, Overloaded
from tests.cluster.fake_router import PIECES, FakeRouter, token

T = TypeVar("T")


async def using(router: FakeRouter, work: Callable[[coatcheck.Client], T]) -> T:
    """What `work` returns, run in a thread with a client of the router."""

    def run() -> T:
        with coatcheck.Client(router.address) as client:
            return work(client)

    return await asyncio.to_thread(run)


def expected(seed: int, count: int) -> str:
    return "".join(PIECES[token(seed, 0, position)] for position in range(count))


async def test_generate_returns_the_whole_answer() -> None:
    """generate() has text, ids, reason, usage and timing."""
    async with FakeRouter() as router:
        result = await using(router, lambda client: client.generate("a b c d", max_tokens=4, seed=3))
    assert (result.text, result.finish_reason) == (expected(3, 4), "length")
    assert result.usage == coatcheck.TokenUsage(prompt_tokens=4, completion_tokens=4, cached_device_tokens=2)
    assert (result.group, result.seed, result.moves) == ("group-0", 3, 0)
    assert result.ttft is not None and result.ttft >= 0


async def test_unset_options_stay_unset() -> None:
    """Only the options that a caller gives are sent, so that the model's defaults hold for the others."""
    async with FakeRouter() as router:
        await using(router, lambda client: client.generate([1, 2], max_tokens=4, stop="x", cache_salt="s"))
    (request,) = router.requests
    assert list(request.token_ids.ids) == [1, 2]
    assert [field.name for field, _ in request.sampling.ListFields()] == ["max_tokens", "stop"]
    assert (list(request.sampling.stop), request.cache_salt) == (["x"], "s")


async def test_sampling_params_set_every_field_and_options_override() -> None:
    """A SamplingParams object is sent whole; an option beside it replaces one field."""
    sampling = coatcheck.SamplingParams(max_tokens=9, temperature=0.0)
    async with FakeRouter() as router:
        await using(router, lambda client: client.generate("a", sampling, max_tokens=3))
    (request,) = router.requests
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (3, 0.0, 1.0)


async def test_chat_sends_messages() -> None:
    """chat() takes messages as OpenAI's clients write them, tool calls included."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    async with FakeRouter() as router:
        await using(router, lambda client: client.chat(messages, max_tokens=2))  # type: ignore[arg-type]
    (request,) = router.requests
    assert [message.role for message in request.chat.messages] == ["user", "assistant", "tool"]
    assert request.chat.messages[1].tool_calls[0].name == "f"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "x", "mood": "good"}], "unknown key 'mood'"),
        ([{"role": "user", "content": ["part"]}], "texts"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tool call"),
        ("Hello", "a list of messages"),
        ({"role": "user", "content": "Hello"}, "a list of messages"),
        (["Hello"], "a list of messages"),
        ([{"role": "user", "content": "\ud800"}], "a lone surrogate"),
    ],
    ids=[
        "unknown key",
        "content is no text",
        "call without a function",
        "a text",
        "one message",
        "a list of texts",
        "half a character",
    ],
)
async def test_malformed_messages_are_refused_before_they_are_sent(messages: Any, said: str) -> None:
    """A message that cannot be sent raises InvalidRequest, and nothing reaches the router."""
    async with FakeRouter() as router:
        with pytest.raises(InvalidRequest, match=said):
            await using(router, lambda client: client.chat(messages))
    assert router.requests == []


async def test_stream_yields_chunks_and_keeps_the_result() -> None:
    """stream() yields the text piece by piece; its `result` is then whole."""

    def work(client: coatcheck.Client) -> tuple[list[str], coatcheck.GenerationResult]:
        stream = client.stream("a", max_tokens=5, seed=1)
        return [chunk.text for chunk in stream], stream.result

    async with FakeRouter() as router:
        pieces, result = await using(router, work)
    assert (len(pieces), "".join(pieces)) == (5, expected(1, 5))
    assert (result.text, result.finish_reason) == (expected(1, 5), "length")


async def test_leaving_a_stream_cancels_its_request() -> None:
    """A stream that is closed early is cancelled at the router."""

    def work(client: coatcheck.Client) -> None:
        with client.stream("a", max_tokens=1000) as stream:
            next(stream)

    async with FakeRouter() as router:
        router.stalls_after = 3
        await using(router, work)
        await asyncio.wait_for(router.left.wait(), MAX_WAIT_SECONDS)


async def test_a_stream_goes_on_at_another_router() -> None:
    """With two addresses a stream outlives the router that began it, token by token."""
    async with FakeRouter("first", losses=[3]) as first, FakeRouter("second") as second:

        def run() -> coatcheck.GenerationResult:
            with coatcheck.Client([first.address, second.address]) as client:
                return client.generate("a", max_tokens=6)

        result = await asyncio.to_thread(run)
    assert (result.text, result.group) == (expected(7, 6), "second")


async def test_threads_share_a_client() -> None:
    """Calls of several threads run side by side over one client."""
    async with FakeRouter() as router:
        router.crowd = 4  # no stream says anything before four run

        def work(client: coatcheck.Client) -> list[str]:
            texts: list[str] = []
            threads = [
                threading.Thread(target=lambda: texts.append(client.generate("a", max_tokens=2).text)) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return texts

        assert await using(router, work) == [expected(7, 2)] * 4


async def test_refusals_are_typed() -> None:
    """A router's status becomes the exception of the same name."""
    async with FakeRouter() as router:
        router.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        with pytest.raises(Overloaded, match="the queue is full"):
            await using(router, lambda client: client.generate("a"))


def test_wrong_arguments_are_refused_at_once() -> None:
    """Addresses, credentials and options that cannot be used raise before anything is sent."""
    with pytest.raises(InvalidConfig, match="HOST:PORT"):
        coatcheck.Client("nowhere")
    with pytest.raises(InvalidConfig, match="tls-key"):
        coatcheck.Client(tls_cert="a.pem")
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match="temperature is -1"):
        client.generate("a", temperature=-1.0)
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match="warmth"):
        client.generate("a", warmth=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "prompt", [5, None, b"a", bytearray(b"a"), ["a text", "another"], [1.5], [-1], [2**32], {"text": 1}]
)
def test_a_prompt_is_one_text_or_one_list_of_token_ids(prompt: Any) -> None:
    """Anything else is refused with what a prompt must be, and with what to do for several prompts."""
    said = "one text, or one list of token ids: .*; for several prompts .* call a client's method once for each"
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match=said):
        client.generate(prompt)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("priority", 2**40, "priority is 1099511627776, "),
        ("cache_salt", 5, "cache_salt is 5, "),
        ("retention", 5, "a coatcheck.proto.retention.Retention"),
        ("structured", "[ab]", "a coatcheck.Grammar"),
        ("stop", 5, "stop is 5; it must be a text, or a list of texts"),
        ("stop", b"ab", "stop is b'ab'; it must be a text, or a list of texts"),
        ("stop", ["a", 5], "it must be a text, or a list of texts"),
        ("stop_token_ids", 5, "stop_token_ids is 5; it must be a list of token ids"),
        ("stop_token_ids", "12", "stop_token_ids is '12'; it must be a list of token ids"),
        ("stop_token_ids", [-1], "it must be a list of token ids: whole numbers from 0"),
        ("stop_token_ids", [2**32], "stop_token_ids is .4294967296,., which its field cannot hold"),
        ("logit_bias", [5], "it must be a mapping from token ids to numbers"),
        ("logit_bias", {"5": 1.0}, "it must be a mapping from token ids to numbers"),
        ("max_tokens", "5", "max_tokens is '5'; it must be a whole number"),
        ("max_tokens", 2**40, "max_tokens is 1099511627776, which its field cannot hold"),
        ("logprobs", True, "logprobs is True; it must be a whole number"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("ignore_eos", "no", "ignore_eos is 'no'; it must be True or False"),
        ("timeout", "x", "timeout is 'x'; it must be a number of seconds from 0 to 31536000, or None"),
        ("timeout", float("nan"), "timeout is nan; it must be a number of seconds"),
    ],
)
def test_an_option_of_a_wrong_type_is_named(option: str, value: object, said: str) -> None:
    """An option whose value cannot be sent is refused by its name."""
    options: dict[str, Any] = {option: value}
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match=said):
        client.generate("a", **options)


def test_every_sampling_option_is_checked() -> None:
    """A value that no sampling option can have is refused by the name of the option, whichever it is."""
    for name in SamplingOptions.__annotations__:
        with pytest.raises(InvalidRequest, match=f"{name} is <.*>; it must be "):
            build_sampling({name: object()})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"addresses": None}, "addresses is None; it must be HOST:PORT such as '127.0.0.1:50051', or a list"),
        ({"addresses": 5}, "addresses is 5; it must be HOST:PORT"),
        ({"addresses": [5]}, "addresses is .5.; it must be HOST:PORT"),
        ({"addresses": b"127.0.0.1:1"}, "it must be HOST:PORT"),
        ({"addresses": []}, "or a list of at least one"),
        ({"credentials": "key"}, "credentials is of type str; it must be a Credentials"),
        ({"api_key": 5}, "api_key is of type int; it must be a text"),
        ({"tls_ca": 5}, "tls_ca is of type int; it must be the path of a PEM file"),
        ({"max_resumes": "x"}, "max_resumes is 'x'; it must be a whole number from 0"),
        ({"resume_timeout": "x"}, "resume_timeout is 'x'; it must be a number of seconds from 0"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(arguments: dict[str, Any], said: str) -> None:
    """An argument that cannot be used raises InvalidConfig with its name and with what it must be."""
    with pytest.raises(InvalidConfig, match=said):
        coatcheck.Client(**arguments)


@pytest.mark.parametrize("token_ids", [5, None, "a", b"a", ["a"], [-1]])
def test_token_ids_of_a_wrong_type_are_refused(token_ids: Any) -> None:
    """`detokenize` refuses what is no list of token ids with what the argument must be."""
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match="token_ids must be one list of token ids"):
        client.detokenize(token_ids)


@pytest.mark.parametrize("sampling", [[coatcheck.SamplingParams()], {"max_tokens": 3}])
def test_several_sampling_params_are_refused(sampling: Any) -> None:
    """A list or a dict in place of a SamplingParams raises InvalidRequest that says to give one."""
    with coatcheck.Client() as client, pytest.raises(InvalidRequest, match="give one SamplingParams, which holds for"):
        client.generate("a", sampling)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    """An option that no request has raises InvalidRequest that lists the options."""
    with (
        coatcheck.Client() as client,
        pytest.raises(InvalidRequest, match="no option max_token; the options are max_tokens, min_tokens, "),
    ):
        client.generate("a", max_token=9)  # type: ignore[call-arg]


def test_import_brings_in_no_libraries() -> None:
    """`import coatcheck` loads neither torch nor gRPC; each name is there, and an unknown one raises AttributeError."""
    program = "import sys, coatcheck; print({'torch', 'grpc', 'ray'} & set(sys.modules), dir(coatcheck))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (f"set() {sorted(coatcheck.__all__)}", "")
    assert all(getattr(coatcheck, name) is not None for name in coatcheck.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llama'"):
        coatcheck.Llama  # noqa: B018
