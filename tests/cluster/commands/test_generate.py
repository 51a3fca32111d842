"""`coatcheck generate`: what it sends, what it prints where, and how it fails."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from tests.cluster.command_line import CommandResult, run_here
from tests.cluster.fake_router import PIECES, FakeRouter, token
from tests.cluster.running_server import COMMAND, coatcheck


async def run(*arguments: str, stdin: str = "") -> CommandResult:
    return await asyncio.to_thread(run_here, "generate", *arguments, stdin=stdin)


def words(seed: int, choice: int, count: int) -> str:
    return "".join(PIECES[token(seed, choice, position)] for position in range(count))


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with FakeRouter() as router:
        yield router


async def test_text_goes_to_stdout_and_usage_to_stderr(router: FakeRouter) -> None:
    """stdout of the real command has the text alone; stderr has one line with the group and the usage."""
    ran = await asyncio.to_thread(coatcheck, "generate", "a b c d", "--address", router.address, "--seed", "3")
    assert (ran.returncode, ran.stdout) == (0, words(3, 0, 5) + "\n")
    line = r"group-0: 4 prompt tokens, 2 cached; 5 generated, the first after \d+ ms, then \d+ a second\n"
    assert re.fullmatch(line, ran.stderr)


async def test_json_object(router: FakeRouter) -> None:
    """--json prints one object with the fields that scripts rely on."""
    ran = await run("a b c d", "--address", router.address, "--json", "--seed", "3", "--max-tokens", "4")
    answer = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert answer["text"] == words(3, 0, 4)
    assert answer["token_ids"] == [token(3, 0, position) for position in range(4)]
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt": 4, "completion": 4, "cached_device": 2, "cached_host": 0}
    assert (answer["group"], answer["routed_by"], answer["seed"]) == ("group-0", "most of its prefix is there", 3)
    assert 0 < answer["ttft_seconds"] < answer["seconds"]
    assert not {"choices", "logprobs", "prompt_logprobs"} & answer.keys()


async def test_several_answers(router: FakeRouter) -> None:
    """With --n the choices are printed at the end with their indices. In JSON each has its log-probabilities."""
    ran = await run("a", "--address", router.address, "--n", "2", "--seed", "3")
    assert ran.out == f"[0] {words(3, 0, 5)}\n[1] {words(3, 1, 5)}\n"
    arguments = ("--n", "2", "--logprobs", "1", "--prompt-logprobs", "0")
    answer = json.loads((await run("a", "--address", router.address, "--json", *arguments)).out)
    assert [choice["text"] for choice in answer["choices"]] == [words(7, 0, 5), words(7, 1, 5)]
    assert answer["text"] == answer["choices"][0]["text"]
    first = answer["logprobs"][0]
    assert first["top"] == [{"token_id": first["token_id"], "logprob": -0.5}]
    assert (first["rank"], len(answer["choices"][1]["logprobs"])) == (1, 5)
    assert answer["prompt_logprobs"] == [{"token_id": 3, "logprob": -1.5, "rank": 2, "top": []}]


async def test_every_flag_reaches_the_request(router: FakeRouter) -> None:
    """Each flag sets its field. All other fields stay unset, so that the server's defaults apply."""
    await run("x", "--address", router.address)
    assert router.requests[0] == pb.GenerateRequest(text="x", sampling=pb.SamplingParams())
    flags = (
        "--max-tokens 9 --min-tokens 2 --temperature 0 --top-k 5 --top-p 0.5 --min-p 0.25 --seed 8 --stop a --stop bc "
        "--stop-token-id 4 --stop-token-id 6 --n 1 --logprobs 0 --prompt-logprobs 2 --ignore-eos --cache-salt s "
        "--repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 0.5 --logit-bias 3=-2.5 --logit-bias 4:1 "
        "--model fake --token-ids --json --retain 0 --retain-seconds 2.5"
    )
    await run("1, 2 [3]", "--address", router.address, *flags.split())
    sampling = pb.SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0, top_k=5, top_p=0.5, min_p=0.25, seed=8, stop=["a", "bc"],
        stop_token_ids=[4, 6], n=1, logprobs=0, prompt_logprobs=2, ignore_eos=True, repetition_penalty=1.5,
        presence_penalty=-1, frequency_penalty=0.5, logit_bias={3: -2.5, 4: 1.0},
    )  # fmt: skip
    ids = pb.TokenIds(ids=[1, 2, 3])
    kept = pb.Retention(priority=0, ttl_seconds=2.5)
    assert router.requests[1] == pb.GenerateRequest(
        model="fake", token_ids=ids, sampling=sampling, cache_salt="s", retention=kept
    )


async def test_chat_and_standard_input(router: FakeRouter) -> None:
    """--chat makes messages of the prompt, and - reads it from standard input."""
    await run("-", "--chat", "--system", "be brief", "--address", router.address, stdin="hello\nthere")
    messages = [pb.ChatMessage(role="system", content="be brief"), pb.ChatMessage(role="user", content="hello\nthere")]
    assert router.requests[0].chat == pb.Chat(messages=messages)


async def test_router_lost_in_mid_stream(router: FakeRouter) -> None:
    """With a second address the text continues without a gap when the first router is lost."""
    async with FakeRouter("group-1", losses=[3]) as first:
        ran = await run("a", "--address", first.address, "--address", router.address, "--seed", "3")
    assert (ran.code, ran.out) == (0, words(3, 0, 5) + "\n")
    assert len(router.requests[0].resume[0].token_ids) == 2


async def test_a_router_that_restarts_leaves_no_noise() -> None:
    """A router that restarts ten times amid a stream makes gRPC print nothing to stderr."""
    async with FakeRouter() as router:
        router.stalls_after = 3
        command = [*COMMAND, "generate", "a", "--address", router.address, "--seed", "3", "--max-tokens", "60"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert process.stdout is not None
        begun = await process.stdout.readexactly(1)
    port = int(router.address.rpartition(":")[2])
    for _ in range(10):
        async with FakeRouter(port=port) as router:
            router.stalls_after = 3
            await router.crowded(1)
    async with FakeRouter(port=port):
        out, err = await process.communicate()
    assert (process.returncode, (begun + out).decode()) == (0, words(3, 0, 60) + "\n")
    assert err.startswith(b"group-0: 1 prompt token,") and err.count(b"\n") == 1, err


async def test_refusal_is_one_line(router: FakeRouter) -> None:
    """A request that the server refuses ends with the server's message, without a traceback, and exit code 2."""
    router.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty; send at least one token")
    ran = await run("", "--address", router.address)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "error: the prompt is empty; send at least one token\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "nan"], "temperature is nan; it must be in [0, 100]"),
        (["--max-tokens", "0"], "max_tokens is 0; it must be at least 1"),
        (["--max-tokens", "4294967296"], "max_tokens is 4294967296, which its field cannot hold"),
    ],
)
async def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    """A bad value ends with one line and exit code 2 before any server is called."""
    ran = await run("x", *arguments, "--address", "127.0.0.1:1")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--token-ids"], "'x' is not a token id"),
        (["9" * 5000, "--token-ids"], "is not a token id; write ids as 1,2,3"),
        (["1", "--token-ids", "--chat"], "exclude each other"),
        (["x", "--system", "s"], "--system needs --chat"),
        (["x", "--logit-bias", "3"], "is not ID=VALUE"),
        (["x", "--logit-bias", "3=a"], "is not ID=VALUE"),
        (["x", "--logit-bias", "-3=1"], "is not ID=VALUE"),
        (["x", "--logit-bias", "9999999999=1"], "is not ID=VALUE"),
        (["x", "--max-tokens", "many"], "max-tokens"),
        (["x", "--logprobs", "1"], "need --json"),
        (["x", "--address", "http://127.0.0.1:50051"], "has a scheme"),
        (["x", "--address", "127.0.0.1"], "is not host:port"),
        (["x", "--address", "127.0.0.1:70000"], "is not host:port"),
        ([], "prompt"),
    ],
)
async def test_wrong_usage(arguments: list[str], message: str) -> None:
    """A contradictory command line ends with exit code 2 before any server is called."""
    ran = await run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err.lower() or message in ran.err
    assert "Traceback" not in ran.err


def test_summary_of_a_moved_answer() -> None:
    """The summary counts failovers, and gives the token rate after the first token and the tokens from host memory."""
    answer = GenerationResult(began=10.0)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=11, cached_device_tokens=1, cached_host_tokens=1)
    final: dict[str, Any] = dict(usage=usage, group="group-1", routed_by="group-1: alone", moves=2)
    answer.add(pb.GenerateEvent(delta=pb.Delta(text="a", token_ids=[1])), now=10.5)
    answer.add(pb.GenerateEvent(final=pb.Final(**final)), now=12.5)
    assert (answer.ttft, answer.decode_rate) == (0.5, 5.0)
    took = "11 generated, the first after 500 ms, then 5 a second; moved 2 times to another group"
    assert answer.summary() == f"group-1: 3 prompt tokens, 2 cached (1 in host memory); {took}"
