"""LoRA adapters at the router: a request names one as its model, and keeps it through routing and failover."""

import json
from typing import Any

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import Adapter, EmbedRequest, GenerateRequest, GetModelResponse, TokenIds
from coatcheck.router.groups.group_connection import group_kind
from coatcheck.router.groups.request import Request
from tests.router.fake_group import EOS, VOCAB, FakeGroup
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.router_under_test import StartRouter
from tests.router.stream import Stream, ask

ADAPTERS = {"sql": "/adapters/sql", "chat": "/adapters/chat"}
HELLO = [{"role": "user", "content": "hello"}]


def model_with(**fingerprints: str) -> GetModelResponse:
    """What a group with these adapters reports."""
    return GetModelResponse(
        name="tiny", max_model_len=256, vocab_size=VOCAB, block_size=4, dtype="float32", kv_dtype="float32",
        fingerprint="weights", eos_token_ids=[EOS],
        adapters=[Adapter(name=name, fingerprint=value) for name, value in fingerprints.items()],
    )  # fmt: skip


@pytest.fixture
async def router(start_http_router: StartHttpRouter) -> HttpRouter:
    """A router with two adapters in front of one group."""
    return await start_http_router(FakeGroup(model=model_with(sql="1", chat="2")), lora_modules=ADAPTERS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "store": False}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/embeddings", {"input": "hello", "truncate_prompt_tokens": 2}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/invocations", {"prompt": "a", "max_tokens": 1}),
    ],
)
async def test_every_api_selects_by_the_models_name(router: HttpRouter, path: str, body: dict[str, Any]) -> None:
    """The name of an adapter reaches the group and stands in the response; the model's own name means no adapter."""
    for asked, adapter, shown in (("sql", "sql", "sql"), ("tiny", "", "tiny"), ("chat", "chat", "chat")):
        status, _, text = await router.request("POST", path, {"model": asked, **body})
        assert (status, json.loads(text)["model"]) == (200, shown), text
        assert router.groups[0].submits[-1].adapter == adapter
    error = await router.expect_refusal(path, {"model": "sq", **body}, 404)
    assert "'sq' does not exist; this server has 'tiny', 'sql', 'chat'" in error["message"]


async def test_the_system_fingerprint_names_the_adapter(router: HttpRouter) -> None:
    """A retrained adapter under its old name changes system_fingerprint, as other weights of the model do."""
    for asked, shown in (("tiny", "fp_weights"), ("sql", "fp_weights-1"), ("chat", "fp_weights-2")):
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
            text = (await router.request("POST", f"/v1/{path}", {"model": asked, "max_tokens": 1, **body}))[2]
            assert json.loads(text)["system_fingerprint"] == shown


async def test_grpc_selects_by_the_models_name(router: HttpRouter) -> None:
    """generate and embed take the adapter from `model`, and GetModel lists the adapters."""
    prompt = TokenIds(ids=[5, 6, 7])
    request = GenerateRequest(model="chat", token_ids=prompt)
    request.sampling.max_tokens = 1
    answer = await router.generation.Generate(request)
    assert answer.started.model == "chat" and router.groups[0].submits[-1].adapter == "chat"
    embedded = await router.generation.Embed(EmbedRequest(model="sql", token_ids=prompt))
    assert embedded.model == "sql" and router.groups[0].submits[-1].adapter == "sql"


async def test_models_lists_adapters(router: HttpRouter) -> None:
    """/v1/models has each adapter with its directory and its parent, as vLLM has them."""
    listed = json.loads((await router.request("GET", "/v1/models"))[2])["data"]
    shown = [(one["id"], one["root"], one["parent"]) for one in listed]
    assert shown == [("tiny", "tiny", None), ("sql", "/adapters/sql", "tiny"), ("chat", "/adapters/chat", "tiny")]
    one = json.loads((await router.request("GET", "/v1/models/chat"))[2])
    assert (one["id"], one["parent"], one["max_model_len"]) == ("chat", "tiny", 256)


async def test_a_stream_moves_with_its_adapter(start_router: StartRouter) -> None:
    """The group that continues a stream gets the adapter with the tokens delivered so far."""
    groups = {name: FakeGroup(name, hold_after=6, model=model_with(sql="1", chat="2")) for name in ("a", "b")}
    router = await start_router(*groups.values(), lora_modules=ADAPTERS)
    request = ask()
    request.model = "sql"
    stream = Stream(router, request)
    first = groups.pop((await stream.read()).started.group)
    while len(stream.ids[0]) < 6:
        await stream.read()
    (second,) = groups.values()
    second.go()
    await first.kill()
    await stream.finish()
    (again,) = second.submits
    assert again.adapter == "sql" and list(again.resume[0].token_ids) == stream.ids[0][:6]


def test_streams_move_between_equal_adapters() -> None:
    """Groups are of one kind if their adapters are equal, in any order; other weights under the same name are not."""
    model = model_with(sql="1", chat="2")
    assert group_kind(model) == group_kind(model_with(chat="2", sql="1"))
    for other in (model_with(sql="1"), model_with(sql="1", chat="3"), model_with()):
        assert group_kind(model) != group_kind(other)


def test_prefixes_of_adapters_do_not_mix() -> None:
    """Block hashes depend on the adapter's weights, not on its name."""

    def hashes(model: GetModelResponse, adapter: str) -> list[bytes]:
        request: Any = Request("r", list(range(2, 20)), None, adapter=adapter)  # type: ignore[arg-type]
        found: list[bytes] = request.block_hashes(model)
        return found

    model, renamed = model_with(sql="1", chat="2"), model_with(text="1")
    assert len({*hashes(model, ""), *hashes(model, "sql"), *hashes(model, "chat")}) == 12
    assert hashes(renamed, "text") == hashes(model, "sql")
    assert hashes(model_with(), "") == hashes(model, "")
