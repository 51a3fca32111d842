"""Thousands of requests that nobody should send, over both protocols, to a whole cluster."""

import http.client
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from coatcheck.proto.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, Resumed, SamplingParams, StructuredOutput
from tests.cluster.serving import Serving, until
from tests.router.http.mutations import mutated

pytestmark = pytest.mark.ray

GOOD = [
    GenerateRequest(
        text="a fox", cache_salt="s", priority=3,
        sampling=SamplingParams(max_tokens=3, seed=1, n=2, stop=["x"], temperature=0.5, logit_bias={5: 1.0}),
        resume=[Resumed(choice=1, token_ids=[5, 6])],
    ),
    GenerateRequest(
        chat=Chat(messages=[ChatMessage(role="user", content="hi")], template_arguments="{}"),
        sampling=SamplingParams(max_tokens=4, structured=StructuredOutput(regex="[a-z]{1,3}"), prompt_logprobs=1),
    ),
]  # fmt: skip
PERMITTED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_thousand_mutated_requests_leave_nothing_behind(tiny_model: Path) -> None:
    """No answer is our fault, every rank still runs, and not one block stays in use."""
    dice, seen = random.Random(3), Counter[str]()
    with Serving(str(tiny_model), "--grpc-port", "0", "--tp", "2", "--kv-memory", "64MiB") as serving:
        serving.wait_ready()
        before = [rank["pid"] for rank in serving.group("group-0")["ranks"]]
        web = http.client.HTTPConnection(serving.url.removeprefix("http://"), timeout=60)
        with grpc.insecure_channel(serving.address) as channel:
            call = channel.unary_unary("/coatcheck.v1.Generation/Generate")
            for _ in range(5000):
                seen[over_http(web, dice)] += 1
                seen[over_grpc(call, dice)] += 1
        assert set(seen) <= {*PERMITTED, "200", "400", "404", "429"}, seen
        assert min(seen["200"], seen["OK"], seen["400"], seen["INVALID_ARGUMENT"]) > 200, seen
        until(lambda: serving.group("group-0")["blocks_used"] == 0, "every block is free again")
        assert [rank["pid"] for rank in serving.group("group-0")["ranks"]] == before


def over_http(web: http.client.HTTPConnection, dice: random.Random) -> str:
    """The status, which is none of ours."""
    path, body = mutated(dice)
    web.request("POST", path, body, {"content-type": "application/json"})
    answer = web.getresponse()
    text = answer.read()
    web.close()  # a slow request of the other protocol may come next, and idle connections are closed
    assert answer.status < 500 and b'"server_error"' not in text, (path, body, text)
    return str(answer.status)


def over_grpc(call: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", dice: random.Random) -> str:
    """The status' name."""
    data = bytearray(dice.choice(GOOD).SerializeToString())
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(data) + 1)
        data[place : place + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 2))
    try:
        call(bytes(data), timeout=30.0)
    except grpc.RpcError as error:
        code: str = error.code().name
        return code
    return "OK"
