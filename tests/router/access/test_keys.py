"""Keys: who is accepted by gRPC and HTTP, and for which methods."""

import asyncio
import base64
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from tests.router.access.key_holders import EYES, OPS, SEARCH, bearer, write_keys
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter
from tests.router.router_under_test import StartRouter


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    """The file on disk."""
    return write_keys(tmp_path / "keys.yaml")


def _request() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="the lazy dog", sampling=pb.SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "no API key was sent; send a key as `authorization: Bearer KEY`"),
        (bearer("cc-wrong"), "invalid API key"),
        ([("authorization", SEARCH)], "unsupported authorization scheme"),
        ([("authorization", "Bearer ")], "unsupported authorization scheme"),
        (
            [("authorization", "Basic " + base64.b64encode(f"a:{SEARCH}".encode()).decode())],
            "unsupported authorization scheme",
        ),
    ],
)
async def test_without_a_key_of_ours_grpc_is_unauthenticated(
    start_router: StartRouter, key_file: str, metadata: Any, said: str
) -> None:
    """Every method refuses, also streams, and no request reaches a group; only the health service is open."""
    group = FakeGroup()
    router = await start_router(group, key_file=key_file)
    calls = [
        router.generation.Generate(_request(), metadata=metadata),
        router.generation.GenerateStream(_request(), metadata=metadata).read(),
        router.generation.Tokenize(pb.TokenizeRequest(text="a"), metadata=metadata),
        router.generation.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=metadata),
        router.generation.GetModel(pb.GetModelRequest(), metadata=metadata),
        router.admin.Status(pb.StatusRequest(), metadata=metadata),
        router.admin.Drain(pb.DrainRequest(), metadata=metadata),
        router.admin.Explain(_request(), metadata=metadata),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert said in (refused.value.details() or "") and "cc-" not in (refused.value.details() or "")
    assert group.submits == [] and router.server.traffic.active == 0 and not router.server.traffic.is_draining


async def test_a_stranger_is_refused_before_its_message(start_http_router: StartHttpRouter, key_file: str) -> None:
    """The status comes although the call has sent no message. The refusal is counted by its reason."""
    router = await start_http_router(FakeGroup(), key_file=key_file)
    for name, method in (
        ("unary", router.channel.stream_unary("/coatcheck.v1.Generation/Generate")),  # type: ignore[call-arg]
        ("stream", router.channel.stream_stream("/coatcheck.v1.Generation/GenerateStream")),  # type: ignore[call-arg]
    ):
        call = method(timeout=MAX_WAIT_SECONDS)  # type: ignore[call-arg]
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, name
    empty = router.channel.stream_unary("/coatcheck.v1.Generation/Generate")(iter(()), metadata=bearer(SEARCH))  # type: ignore[call-arg]
    assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT and "without a whole message" in await empty.details()
    with pytest.raises(grpc.aio.AioRpcError):
        await router.admin.Status(pb.StatusRequest(), metadata=bearer(SEARCH))
    await router.request("GET", "/v1/models")
    _, _, text = await router.request("GET", "/metrics", None, {"authorization": f"Bearer {EYES}"})
    assert 'coatcheck_refusals_total{reason="unauthenticated"} 3.0' in text
    assert 'coatcheck_refusals_total{reason="permission_denied"} 1.0' in text


async def test_admin_is_apart_from_public(start_router: StartRouter, key_file: str) -> None:
    """A user's key only generates, a monitor's only observes, and an admin's does both and manages."""
    group = FakeGroup()
    router = await start_router(group, key_file=key_file)

    async def code(call: Any) -> grpc.StatusCode:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    able = {}
    for key in (SEARCH, EYES, OPS):
        able[key] = [
            await code(router.generation.Generate(_request(), metadata=bearer(key))) is grpc.StatusCode.OK,
            await code(router.admin.Status(pb.StatusRequest(), metadata=bearer(key))) is grpc.StatusCode.OK,
            await code(router.admin.Explain(_request(), metadata=bearer(key))) is grpc.StatusCode.OK,
            await code(router.admin.Drain(pb.DrainRequest(undo=True), metadata=bearer(key))) is grpc.StatusCode.OK,
        ]
    assert able == {
        SEARCH: [True, False, False, False],
        EYES: [False, True, True, False],
        OPS: [True, True, True, True],
    }
    denied = await code(router.admin.Drain(pb.DrainRequest(), metadata=bearer(SEARCH)))
    assert denied is grpc.StatusCode.PERMISSION_DENIED and not router.server.traffic.is_draining


async def test_tenants_do_not_share_a_cache(start_router: StartRouter, key_file: str) -> None:
    """The same prompt with the same salt of two tenants reaches the group under two salts."""
    group = FakeGroup()
    router = await start_router(group, key_file=key_file)
    message = _request()
    message.cache_salt = "6:search"
    for key in (SEARCH, OPS):
        await router.generation.Generate(message, metadata=bearer(key))
    assert [submit.cache_salt for submit in group.submits] == ["6:search6:search", "3:ops6:search"]


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/v1/models", None, 401),
        ("GET", "/v1/models", "cc-wrong", 401),
        ("GET", "/v1/models", SEARCH, 200),
        ("GET", "/v1/models", EYES, 403),
        ("POST", "/v1/completions", None, 401),
        ("POST", "/v1/chat/completions", "cc-wrong", 401),
        ("POST", "/tokenize", None, 401),
        ("POST", "/detokenize", None, 401),
        ("GET", "/metrics", None, 401),
        ("GET", "/metrics", SEARCH, 403),
        ("GET", "/metrics", EYES, 200),
        ("GET", "/openapi.json", None, 401),
        ("GET", "/nowhere", None, 401),
        ("GET", "/nowhere", OPS, 404),
    ],
)
async def test_what_http_answers_to_a_key(
    start_http_router: StartHttpRouter, key_file: str, method: str, path: str, key: str | None, status: int
) -> None:
    """401 without a known key, 403 if the role is too low, both in OpenAI's form; probes need no key."""
    router = await start_http_router(FakeGroup(), key_file=key_file)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    got, answered, text = await router.request(method, path, b"{}" if method == "POST" else None, headers)
    assert got == status, text
    if status in (401, 403):
        kind = {401: "authentication_error", 403: "permission_error"}[status]
        error = json.loads(text)["error"]
        assert error["type"] == kind and error["message"] and "cc-" not in text
        assert ("Bearer" in answered.get("www-authenticate", "")) == (status == 401)


async def test_openai_s_client_has_a_key(start_router: StartRouter, key_file: str) -> None:
    """The client's api_key is accepted; a wrong one raises AuthenticationError."""
    group = FakeGroup()
    router = await start_router(group, key_file=key_file, http_port=0)
    base = f"http://{router.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=SEARCH, max_retries=0) as client:
        await client.completions.create(model="tiny", prompt="the lazy dog", max_tokens=2)
    assert group.submits[0].cache_salt == "6:search"
    async with openai.AsyncOpenAI(base_url=base, api_key="cc-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="invalid API key"):
            await client.completions.create(model="tiny", prompt="the lazy dog", max_tokens=2)


async def test_a_browser_sends_the_key_as_a_password(start_http_router: StartHttpRouter, key_file: str) -> None:
    """HTTP's basic authentication is accepted for pages, but not for requests, because any page could make a browser
    send them."""
    router = await start_http_router(FakeGroup(), key_file=key_file)
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{OPS}".encode()).decode()}
    assert (await router.request("GET", "/metrics", None, basic))[0] == 200
    assert (await router.request("POST", "/v1/completions", {"prompt": "a"}, basic))[0] == 401
    assert (await router.request("GET", "/metrics", None, {"authorization": "Basic ?"}))[0] == 401


async def test_a_body_without_a_key_is_not_kept(start_http_router: StartHttpRouter, key_file: str) -> None:
    """A body without a key gets 401, even if it is larger than the limit and still arriving."""
    router = await start_http_router(FakeGroup(), key_file=key_file)
    status, _, _ = await router.request("POST", "/v1/completions", b"x" * (40 << 20))
    assert status == 401


async def test_no_key_is_ever_logged(
    start_http_router: StartHttpRouter, key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a key nor what was sent in its place is logged, whatever the outcome and at any level."""
    caplog.set_level(logging.DEBUG)
    router = await start_http_router(FakeGroup(), key_file=key_file)
    for key in (SEARCH, EYES, "cc-wrong"):
        headers = {"authorization": f"Bearer {key}"}
        await router.request("POST", "/v1/completions", {"prompt": "the lazy dog", "max_tokens": 1}, headers)
        await router.request("POST", "/v1/completions", b"{", headers)
        await asyncio.gather(
            router.generation.Generate(_request(), metadata=bearer(key)),
            router.admin.Drain(pb.DrainRequest(group="none"), metadata=bearer(key)),
            return_exceptions=True,
        )
    status = await router.admin.Status(pb.StatusRequest(), metadata=bearer(OPS))
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpcore", "openai"))]
    for key in (SEARCH, OPS, EYES, "cc-wrong"):
        assert not any(key in line for line in ours) and key not in str(status)
        assert key not in repr(router.server.config)
