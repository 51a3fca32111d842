"""Hostile clients against a whole cluster with TLS, client certificates and keys, over gRPC and HTTP."""

import contextlib
import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Resumed,
    SamplingParams,
    StructuredOutput,
)
from coatcheck.router.config import MESSAGE_BYTES
from tests.cluster.running_server import until
from tests.examples import examples
from tests.router.openai.mutations import mutated
from tests.system.secure_cluster import SecureCluster, secure_cluster, vanish

pytestmark = [pytest.mark.full, pytest.mark.ray]

DEMO = Path(__file__).parents[2] / "demo" / "model"
GENERATE, STREAM = "/coatcheck.v1.Generation/Generate", "/coatcheck.v1.Generation/GenerateStream"
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
UNCOMPILABLE = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    for schema in (
        {"type": "nothing"}, {"$ref": "#/nowhere"}, {"pattern": "(?=a)b", "type": "string"}, {"multipleOf": 999983},
        {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(8000)}}, {"type": 5},
    )
] + [{"structured_outputs": {"regex": "("}}, {"structured_outputs": {"grammar": "start: nothing"}},
     {"structured_outputs": {"choice": []}}]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    """One group of two ranks. At the end the same processes run, and every block is free."""
    with secure_cluster(str(DEMO), tmp_path_factory.mktemp("cluster"), "--tp", "2", "--kv-memory", "64MiB") as opened:
        actors = {pid for pid, command in opened.serving.descendants().items() if command.startswith("ray::")}
        yield opened
        is_at_rest(opened)
        left = {pid for pid, command in opened.serving.descendants().items() if command.startswith("ray::")}
        assert actors == left, "a process has ended"
        assert opened.ask("POST", "/v1/completions", b'{"prompt": "def", "max_tokens": 2}')[0] == 200


def is_at_rest(cluster: SecureCluster) -> None:
    """Wait until no request is open and no block is in use."""
    until(lambda: cluster.metric("coatcheck_active_requests") == 0, "no request is open")
    until(lambda: cluster.metric("coatcheck_group_blocks", tier="device", use="used") == 0, "every block is free")


def called(cluster: SecureCluster, data: bytes, key: str | None, method: str = GENERATE) -> grpc.RpcError | None:
    """The error of a gRPC call with the known certificate; None if it succeeds."""
    metadata = () if key is None else (("authorization", key),)
    with cluster.channel(cluster.known, ("grpc.max_send_message_length", -1)) as channel:
        try:
            channel.unary_unary(method)(data, timeout=MAX_WAIT_SECONDS, metadata=metadata)  # type: ignore[call-arg]
        except grpc.RpcError as error:
            return error
    return None


def test_wrong_credentials(cluster: SecureCluster) -> None:
    """Keys that are missing, wrong, withdrawn or of the wrong role, and certificates that are not valid, are refused
    over gRPC and HTTP."""
    wrong = f"cc-wrong-{'x' * 30}"
    cluster.secrets.add(wrong)
    tenants = yaml.safe_load(cluster.key_file.read_text())
    tenants["tenants"] = [tenant for tenant in tenants["tenants"] if tenant["name"] != "gone"]
    cluster.key_file.write_text(yaml.safe_dump(tenants))
    body, question = b'{"prompt": "def", "max_tokens": 2}', GOOD[0].SerializeToString()
    withdrawn = cluster.headers("gone")
    until(lambda: cluster.ask("POST", "/v1/completions", body, withdrawn)[0] == 401, "a withdrawn key is refused")
    for sent in (None, f"Bearer {wrong}", "Bearer ", "Basic !", f"Bearer {cluster.keys['gone']}", "\xff"):
        headers = {"content-type": "application/json", **({} if sent is None else {"authorization": sent})}
        status, text = cluster.ask("POST", "/v1/completions", body, headers)
        assert status == 401 and b"key" in text
        if sent != "\xff":  # which gRPC's own client does not send
            error = called(cluster, question, sent)
            assert error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED
    for tenant, method, path in (("search", "GET", "/metrics"), ("eyes", "POST", "/v1/completions")):
        assert cluster.ask(method, path, body, cluster.headers(tenant))[0] == 403
    error = called(cluster, b"", f"Bearer {cluster.keys['search']}", "/coatcheck.v1.Admin/Drain")
    assert error is not None and error.code() is grpc.StatusCode.PERMISSION_DENIED
    for leaf in cluster.bad.values():
        with cluster.channel(leaf) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(GENERATE)(question, timeout=MAX_WAIT_SECONDS, metadata=cluster.metadata())  # type: ignore[call-arg]
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        web = http.client.HTTPSConnection(
            cluster.serving.url.removeprefix("https://"), timeout=MAX_WAIT_SECONDS, context=cluster.context(leaf)
        )
        with contextlib.closing(web), pytest.raises(OSError):
            web.request("GET", "/health")
            web.getresponse()
    with cluster.plain() as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(100)[:5] in (
                b"",
                b"\x15\x03\x03\x00\x02",
                b"\x15\x03\x01\x00\x02",
            )  # an alert, if anything
    assert called(cluster, question, cluster.headers()["authorization"]) is None


def test_bodies_that_nobody_reads(cluster: SecureCluster) -> None:
    """A body that is too long, not JSON, compressed, or has too many values is a client error that says what to
    change."""
    long = b'{"prompt": "' + b"a" * MESSAGE_BYTES + b'"}'
    status, text = cluster.ask("POST", "/v1/completions", long)
    assert status == 413 and b"send less" in text
    status, _ = cluster.ask("POST", "/v1/completions", iter([long[:1000]] * (MESSAGE_BYTES // 1000 + 2)))  # in chunks
    assert status == 413
    assert cluster.ask("POST", "/v1/completions", b'{"prompt": [' + b"[]," * (1 << 21) + b"[]]}")[0] == 413
    for bad in (b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": ' * 3000, b'{"prompt": "\\ud800"}', b"NaN", b"null"):
        status, text = cluster.ask("POST", "/v1/completions", bad)
        assert status == 400 and json.loads(text)["error"]["message"], bad[:20]
    assert cluster.ask("POST", "/v1/completions", b"x", cluster.headers(**{"content-encoding": "gzip"}))[0] == 415
    error = called(cluster, long, cluster.headers()["authorization"])
    assert error is not None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = called(cluster, b"\xff" * 100, cluster.headers()["authorization"])
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    is_at_rest(cluster)


def test_grammars_that_cannot_be_compiled(cluster: SecureCluster) -> None:
    """Each is refused with a reason before it reaches a group, and other requests are answered meanwhile."""
    for asked in UNCOMPILABLE:
        status, text = cluster.ask("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, **asked}))
        said = json.loads(text).get("error", {}).get("message", "")
        assert status == 400 and said, (list(asked), text[:300])
    bad = GenerateRequest(text="a", sampling=SamplingParams(max_tokens=2, structured=StructuredOutput(regex="(")))
    error = called(cluster, bad.SerializeToString(), cluster.headers()["authorization"])
    assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_clients_that_vanish(cluster: SecureCluster) -> None:
    """Two hundred streams whose clients disconnect at some point: every request ends, and every block is free."""
    dice = random.Random(5)

    def come_and_go(number: int) -> None:
        body = {"prompt": f"def f{number}", "max_tokens": 1500, "stream": True, "n": dice.randint(1, 3)}
        sent = cluster.sender(json.dumps({**body, "ignore_eos": True}).encode())
        if number % 3:
            sent.recv(dice.randint(1, 4200))
        (vanish if number % 2 else socket.socket.close)(sent)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come_and_go, range(200)))
    is_at_rest(cluster)
    assert cluster.metric("coatcheck_requests_total", outcome="cancelled") > 100


def test_readers_that_stop(cluster: SecureCluster) -> None:
    """Clients that keep their connection and read nothing are disconnected. Meanwhile their blocks are free for
    others."""
    asked = {"prompt": "def", "max_tokens": 1800, "n": 4, "stream": True, "logprobs": 5, "ignore_eos": True}
    body = json.dumps(asked).encode()
    message = GenerateRequest(text="def", sampling=SamplingParams(max_tokens=1800, n=4, logprobs=20, ignore_eos=True))
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(cluster.sender(body, buffer=4096))
            channel = held.enter_context(cluster.channel(cluster.known, *options))
            method = channel.unary_stream(STREAM)  # type: ignore[call-arg]
            held.callback(method(message.SerializeToString(), metadata=cluster.metadata()).cancel)
        until(lambda: cluster.metric("coatcheck_running_requests") > 0, "they run")
        is_at_rest(cluster)
    ended = cluster.metric("coatcheck_requests_total") - cluster.metric("coatcheck_requests_total", outcome="ok")
    assert ended >= 8


def test_ten_thousand_mutated_requests(cluster: SecureCluster) -> None:
    """No answer is a server error: 4,200 mutated bodies, 4,200 mutated messages, and 2,000 requests that schemathesis
    makes from the OpenAPI description. The router's memory stays within its limit."""
    before = cluster.metric("process_resident_memory_bytes")
    with ThreadPoolExecutor(3) as threads:
        parts = [threads.submit(part, cluster) for part in (over_http, over_grpc, over_schema)]
        seen = sum((part.result() for part in parts), Counter[str]())
    grown = cluster.metric("process_resident_memory_bytes") - before
    print(f"{seen.total()} requests: {dict(seen)}; the router's memory grew by {grown / 2**20:.0f} MiB")
    assert seen.total() >= 10_000
    assert set(seen) <= {*PERMITTED, "200", "400", "404", "405", "413", "429"}, seen
    assert min(seen["200"], seen["OK"], seen["400"], seen["INVALID_ARGUMENT"]) > 200, seen
    assert grown < 200 << 20
    is_at_rest(cluster)


def over_http(cluster: SecureCluster) -> Counter[str]:
    """Send 4,200 mutated bodies."""
    dice, seen = random.Random(3), Counter[str]()
    web = cluster.web()
    for _ in range(4200):
        path, body = mutated(dice)
        web.request("POST", path, body, cluster.headers())
        answer = web.getresponse()
        text = answer.read()
        assert answer.status < 500 and b'"server_error"' not in text, (path, body, text)
        seen[str(answer.status)] += 1
    web.close()
    return seen


def over_grpc(cluster: SecureCluster) -> Counter[str]:
    """Send 4,200 mutated messages."""
    dice, seen = random.Random(4), Counter[str]()
    with cluster.channel(cluster.known) as channel:
        call = channel.unary_unary(GENERATE)  # type: ignore[call-arg]
        for _ in range(4200):
            data = bytearray(dice.choice(GOOD).SerializeToString())
            for _ in range(dice.randint(1, 3)):
                place = dice.randrange(len(data) + 1)
                data[place : place + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 2))
            try:
                call(bytes(data), timeout=MAX_WAIT_SECONDS, metadata=cluster.metadata())
                seen["OK"] += 1
            except grpc.RpcError as error:
                seen[error.code().name] += 1
    return seen


def over_schema(cluster: SecureCluster) -> Counter[str]:
    """Send 2,000 valid and invalid requests of every operation."""
    seen, url = Counter[str](), cluster.serving.url
    show: dict[str, Any] = {
        "verify": str(cluster.authority.ca),
        "cert": (str(cluster.known.cert), str(cluster.known.key)),
        "timeout": MAX_WAIT_SECONDS,
    }
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=cluster.headers("ops"), **show)
    operations = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            posts = operation.method.upper() == "POST"
            if mode is GenerationMode.NEGATIVE and not posts:
                continue

            @settings(max_examples=examples(240) if posts else 20, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case[Any]) -> None:
                answer = case.call(base_url=url, headers=cluster.headers("ops"), **show)
                seen[str(answer.status_code)] += 1
                assert answer.status_code < 500 and b'"server_error"' not in answer.content, answer.text

            ask()
    return seen


def test_no_secret_is_written(cluster: SecureCluster) -> None:
    """After all tests of this file no log, argument or page contains a key, a line of a private key, or Ray's token."""
    texts = cluster.written()
    assert len(texts) > 15 and sum(map(len, texts.values())) > 10_000
    assert [(name, secret[:3]) for name, text in texts.items() for secret in cluster.secrets if secret in text] == []
