"""/v1/embeddings, /v1/score, /rerank and gRPC's Embed over a fake group."""

import json
import math
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from openai import BadRequestError
from tokenizers import processors

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.serving.embed_service import _read_pooling
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.fake_group import EOS, FakeGroup, fake_embedding
from tests.router.http_router import StartHttpRouter
from tests.router.tiny_tokenizer import byte_level_tokenizer

TEXTS = ["hello", "hello world", "one two three"]


def expected(text: str, dimensions: int = 9, pooling: int = pb.POOLING_LAST) -> Any:
    """The normalized embedding of a text."""
    values = np.array(fake_embedding(byte_level_tokenizer().encode(text).ids, pooling)[:dimensions])
    return pytest.approx(values / np.linalg.norm(values), abs=1e-6)


async def test_openai_s_client_gets_embeddings(start_http_router: StartHttpRouter) -> None:
    """One for each input, in order, normalized; as base64, which is the client's default, and as numbers."""
    router = await start_http_router(FakeGroup())
    create = router.openai.embeddings.create
    whole = await create(model="tiny", input=TEXTS)
    assert [one.index for one in whole.data] == [0, 1, 2]
    for one, text in zip(whole.data, TEXTS, strict=True):
        assert one.embedding == expected(text)
    count = sum(len(byte_level_tokenizer().encode(text).ids) for text in TEXTS)
    assert (whole.model, whole.usage.prompt_tokens, whole.usage.total_tokens) == ("tiny", count, count)
    assert whole.model_extra is not None and whole.model_extra["id"].startswith("embd-")
    numbers = await create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=4)
    assert numbers.data[0].embedding == expected(TEXTS[0], 4)
    ids = byte_level_tokenizer().encode(TEXTS[1]).ids
    for given in (ids, [ids]):
        assert (await create(model="tiny", input=given)).data[0].embedding == expected(TEXTS[1])
    for name in ("normalize", "use_activation"):
        options = {"pooling": "mean", name: False, "padding": "do_not_pad"}
        raw = await create(model="tiny", input="hello", extra_body=options)
        assert raw.data[0].embedding == fake_embedding(byte_level_tokenizer().encode("hello").ids, pb.POOLING_MEAN)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ["a", ""]}, "empty"),
        ({"input": []}, "empty"),
        ({}, "give either input or messages"),
        ({"input": "a", "messages": []}, "give either input or messages"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1 or at least 1"),
        ({"input": "a", "dimensions": 10}, "the model's embeddings have 9"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "padding": "max_length"}, "Unsupported parameter 'padding'"),
        ({"input": "a " * 900}, "maximum context length"),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens is for texts",
        ),
        ({"input": "a", "temperature": 1.0}, "Unknown parameter 'temperature'"),
    ],
)
async def test_wrong_bodies_are_refused(start_http_router: StartHttpRouter, body: Any, message: str) -> None:
    """Each is refused with a message that names what is wrong."""
    router = await start_http_router(FakeGroup())
    assert message in (await router.expect_refusal("/v1/embeddings", body))["message"]


async def test_prompts_are_cut(start_http_router: StartHttpRouter) -> None:
    """truncate_prompt_tokens keeps the first tokens of each text, or the last; -1 keeps what the context has."""
    router = await start_http_router(FakeGroup())
    group, ids = router.groups[0], byte_level_tokenizer().encode("one two three").ids
    for given, side, kept in ((2, "right", ids[:2]), (2, "left", ids[-2:]), (-1, "right", ids), (999, "left", ids)):
        for body in ({"input": "one two three"}, {"input": ids}):
            options = {"truncate_prompt_tokens": given, "truncation_side": side}
            assert (await router.request("POST", "/v1/embeddings", body | options))[0] == 200
            assert list(group.submits[-1].prompt_token_ids) == kept
    assert (await router.request("POST", "/v1/embeddings", {"input": "a " * 900, "truncate_prompt_tokens": -1}))[
        0
    ] == 200
    assert len(group.submits[-1].prompt_token_ids) == 256
    pair = {"text_1": "one two", "text_2": "one three", "truncate_prompt_tokens": 1}
    score = json.loads((await router.request("POST", "/score", pair))[2])["data"][0]["score"]
    assert score == pytest.approx(1.0)


async def test_an_input_may_have_the_context_s_length(start_http_router: StartHttpRouter) -> None:
    """256 tokens have an embedding, and 257 are refused; a prompt to generate from leaves room for a token."""
    router = await start_http_router(FakeGroup())
    assert (await router.request("POST", "/v1/embeddings", {"input": [5] * 256}))[0] == 200
    refused = await router.expect_refusal("/v1/embeddings", {"input": [5] * 257})
    assert "Shorten it to at most 256 tokens" in refused["message"]
    refused = await router.expect_refusal("/v1/completions", {"prompt": [5] * 256, "max_tokens": 1})
    assert "Shorten it to at most 255 tokens" in refused["message"]


async def test_cut_inputs_fit_into_a_small_pool(start_http_router: StartHttpRouter) -> None:
    """truncate_prompt_tokens -1 keeps what a group's pool holds, if that is less than the model's context."""
    group = FakeGroup(num_blocks=4)
    router = await start_http_router(group)
    body = {"input": "a " * 900, "truncate_prompt_tokens": -1}
    assert (await router.request("POST", "/v1/embeddings", body))[0] == 200
    assert len(group.submits[-1].prompt_token_ids) == 4 * group.model.block_size


@pytest.mark.parametrize(
    ("cut", "query", "document"),
    [
        ({"max_tokens_per_doc": 2}, 3, 2),
        ({"max_tokens_per_doc": 0}, 3, 3),
        ({"max_tokens_per_doc": 2, "truncate_prompt_tokens": 1}, 1, 1),
        ({"max_tokens_per_doc": 1, "truncate_prompt_tokens": -1}, 3, 1),
    ],
)
async def test_documents_are_cut(
    start_http_router: StartHttpRouter, cut: dict[str, int], query: int, document: int
) -> None:
    """max_tokens_per_doc, which Cohere's clients send, cuts the documents and not the query."""
    group = FakeGroup()
    router = await start_http_router(group)
    body = {"query": "one two three", "documents": ["four five six"], **cut}
    assert (await router.request("POST", "/rerank", body))[0] == 200
    asked = byte_level_tokenizer().encode("one two three").ids, byte_level_tokenizer().encode("four five six").ids
    assert sorted(list(submit.prompt_token_ids) for submit in group.submits) == sorted(
        [asked[0][: query if query < 3 else None], asked[1][: document if document < 3 else None]]
    )
    assert (await router.request("POST", "/rerank", body | {"max_tokens_per_doc": -5}))[0] == 400


async def test_a_chat_has_an_embedding(start_http_router: StartHttpRouter) -> None:
    """`messages` in place of `input`: the chat as the template writes it, without the beginning of an answer."""
    router = await start_http_router(FakeGroup())
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    plain: dict[str, Any] = {"add_special_tokens": False}
    for more, text in (
        ({}, "<|user|>hello"),
        (plain, "<|user|>hello"),
        ({"add_generation_prompt": True}, "<|user|>hello<|assistant|>"),
    ):
        assert (await router.request("POST", "/v1/embeddings", chat | more))[0] == 200
        ids = [token for token in router.groups[0].submits[-1].prompt_token_ids if token != EOS]
        assert byte_level_tokenizer().decode(ids) == text


async def test_a_text_may_lack_the_tokenizer_s_special_tokens(start_http_router: StartHttpRouter) -> None:
    """`add_special_tokens: false`, as /tokenize has it; also with a text that is cut."""
    tokenizer = byte_level_tokenizer()
    end = tokenizer.id_to_token(EOS)
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, EOS)])
    router = await start_http_router(FakeGroup(), tokenizer=TokenizerJson(tokenizer, None))
    for more, kept in (({}, None), ({"truncate_prompt_tokens": 2}, 2), ({"truncate_prompt_tokens": -1}, None)):
        plain = {"prompt": "hello", "add_special_tokens": False}
        wanted = json.loads((await router.request("POST", "/tokenize", plain))[2])["tokens"][:kept]
        body = {"input": "hello", "add_special_tokens": False} | more
        assert (await router.request("POST", "/v1/embeddings", body))[0] == 200
        assert list(router.groups[0].submits[-1].prompt_token_ids) == wanted
    assert (await router.request("POST", "/v1/embeddings", {"input": "hello"}))[0] == 200
    usual = list(router.groups[0].submits[-1].prompt_token_ids)
    assert EOS in usual and EOS not in wanted
    error = await router.expect_refusal("/v1/embeddings", {"input": "a" * 5000, "add_special_tokens": False})
    assert error["code"] == "context_length_exceeded"


async def test_several_chats_have_an_embedding_each(start_http_router: StartHttpRouter) -> None:
    """As vLLM's `messages` of several conversations; the errors of each name its place."""
    router = await start_http_router(FakeGroup())
    chats = [[{"role": "user", "content": text}] for text in ("hello", "the fox")]
    alone = []
    for chat in chats:
        found = json.loads((await router.request("POST", "/v1/embeddings", {"messages": chat}))[2])
        alone.append(found["data"][0]["embedding"])
    together = json.loads((await router.request("POST", "/v1/embeddings", {"messages": chats}))[2])
    assert [one["embedding"] for one in together["data"]] == alone and alone[0] != alone[1]
    assert [one["index"] for one in together["data"]] == [0, 1]
    for wrong, words in (
        ([*chats, [{"role": "user", "content": 5}]], "messages.2.0.content"),
        ([*chats, {"role": "user", "content": "a"}], "messages.2"),
        ([*chats, []], "no messages"),
        ([chats[0]] * 1025, "messages"),
    ):
        error = await router.expect_refusal("/v1/embeddings", {"messages": wrong})
        assert words in error["message"], error


async def test_an_unknown_model_is_refused(start_http_router: StartHttpRouter) -> None:
    """As at every endpoint."""
    router = await start_http_router(FakeGroup())
    await router.expect_refusal("/v1/embeddings", {"model": "other", "input": "a"}, 404)


async def test_a_lost_group_loses_no_embedding(start_http_router: StartHttpRouter) -> None:
    """An embedding whose group dies is computed by another group."""
    router = await start_http_router(FakeGroup("g0", die_on_submit=True), FakeGroup("g1"))
    for _ in range(2):
        assert (await router.openai.embeddings.create(model="tiny", input="hello")).data[0].embedding == expected(
            "hello"
        )


async def test_scores_are_cosines(start_http_router: StartHttpRouter) -> None:
    """/v1/score compares one text with each of several, or texts in pairs; other numbers of texts are refused."""
    router = await start_http_router(FakeGroup())
    ids = [byte_level_tokenizer().encode(text).ids for text in TEXTS]
    states = [np.array(fake_embedding(one, pb.POOLING_LAST)) for one in ids]
    unit = [state / np.linalg.norm(state) for state in states]

    async def scores(body: dict[str, Any]) -> list[float]:
        status, _, text = await router.request("POST", "/v1/score", body)
        assert status == 200, text
        return [one["score"] for one in json.loads(text)["data"]]

    one_to_many = await scores({"text_1": TEXTS[0], "text_2": TEXTS})
    assert one_to_many == pytest.approx([unit[0] @ other for other in unit])
    assert one_to_many[0] == pytest.approx(1.0)
    assert await scores({"queries": TEXTS[:2], "documents": TEXTS[1:]}) == pytest.approx(
        [unit[0] @ unit[1], unit[1] @ unit[2]]
    )
    await router.expect_refusal("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    await router.expect_refusal("/v1/score", {"text_1": "", "text_2": TEXTS})


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(start_http_router: StartHttpRouter, path: str) -> None:
    """The most similar comes first, at most top_n, with its index and text."""
    router = await start_http_router(FakeGroup())
    documents = [TEXTS[2], {"text": TEXTS[0]}, TEXTS[1]]
    body = {"query": TEXTS[0], "documents": documents, "top_n": 2}
    status, _, text = await router.request("POST", path, body)
    assert status == 200, text
    results = json.loads(text)["results"]
    assert len(results) == 2
    assert results[0] == {"index": 1, "relevance_score": pytest.approx(1.0), "document": {"text": TEXTS[0]}}
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    status, _, text = await router.request("POST", path, body | {"return_documents": False, "top_n": 0})
    assert [sorted(one) for one in json.loads(text)["results"]] == [["index", "relevance_score"]] * 3


async def test_embed_over_grpc(start_http_router: StartHttpRouter) -> None:
    """Embed returns the embedding of a text, of ids or of a chat; a generation with `pooling` returns it too."""
    router = await start_http_router(FakeGroup())
    stub = router.generation
    made = await stub.Embed(pb.EmbedRequest(text="hello", dimensions=5, request_id="me"))
    assert list(made.embedding) == expected("hello", 5)
    assert (made.request_id, made.model, made.group, made.prompt_tokens) == ("me", "tiny", "g0", 1)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    assert len((await stub.Embed(pb.EmbedRequest(chat=chat))).embedding) == 9
    request = pb.GenerateRequest(text="hello", pooling=pb.POOLING_MEAN, sampling=pb.SamplingParams(max_tokens=3))
    answer = await stub.Generate(request)
    ids = byte_level_tokenizer().encode("hello").ids
    assert list(answer.final.embedding) == fake_embedding(ids, pb.POOLING_MEAN)
    assert len(answer.choices[0].token_ids) == 3
    for wrong in (pb.EmbedRequest(), pb.EmbedRequest(text="a", dimensions=0), pb.EmbedRequest(text="a", pooling=7)):  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Embed(wrong)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_embed_over_connect(start_http_router: StartHttpRouter) -> None:
    """The HTTP port serves Embed in the Connect protocol."""
    router = await start_http_router(FakeGroup())
    status, _, text = await router.request("POST", "/coatcheck.v1.Generation/Embed", {"text": "hello"})
    assert status == 200
    assert math.hypot(*json.loads(text)["embedding"]) == pytest.approx(1.0)


async def test_large_responses_are_equal(start_http_router: StartHttpRouter) -> None:
    """Hundreds of embeddings, whose response another process makes, are those of single requests."""
    router = await start_http_router(FakeGroup(num_blocks=4096))
    texts = [f"text {number}" for number in range(600)]
    many = await router.openai.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert many.data[599].embedding == expected(texts[599])


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ('{"pooling_mode_mean_tokens": true}', pb.POOLING_MEAN),
        ('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false}', pb.POOLING_LAST),
        ("no json", pb.POOLING_LAST),
        (None, pb.POOLING_LAST),
    ],
)
def test_the_checkpoint_names_its_pooling(tmp_path: Path, config: str | None, pooling: int) -> None:
    """sentence-transformers' file decides between mean and last; without it, the last token counts."""
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(config)
    assert _read_pooling(tmp_path) == pooling


async def test_an_unknown_pooling_is_an_error_of_the_client(start_http_router: StartHttpRouter) -> None:
    """OpenAI's client gets a BadRequestError with the field's name."""
    router = await start_http_router(FakeGroup())
    with pytest.raises(BadRequestError, match="pooling"):
        await router.openai.embeddings.create(model="tiny", input="a", extra_body={"pooling": "cls"})
