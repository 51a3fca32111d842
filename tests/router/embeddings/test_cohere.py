"""/v2/embed, Cohere's API of embeddings, over a fake group."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.router.embeddings.cohere_request import CohereEmbedRequest
from coatcheck.router.http.errors import InvalidBody
from coatcheck.router.serving.embed_service import _read_instructions
from tests.router.fake_group import FakeGroup, fake_embedding
from tests.router.http_router import HttpRouter, StartHttpRouter
from tests.router.tiny_tokenizer import byte_level_tokenizer

TEXTS = ["hello", "one two three"]


def unit(text: str, dimensions: int = 9) -> Any:
    """The normalized embedding of a text."""
    values = np.array(fake_embedding(byte_level_tokenizer().encode(text).ids, pb.POOLING_LAST)[:dimensions])
    return values / np.linalg.norm(values)


async def embed(router: HttpRouter, **body: Any) -> dict[str, Any]:
    """The response to a body with the model's name."""
    status, _, text = await router.request("POST", "/v2/embed", {"model": "tiny", **body})
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


async def test_texts_have_embeddings_of_each_type(start_http_router: StartHttpRouter) -> None:
    """Each type is computed from the same normalized values, and the response has Cohere's form."""
    router = await start_http_router(FakeGroup())
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = await embed(
        router, texts=TEXTS, embedding_types=kinds, output_dimension=8, input_type="search_query", truncate="NONE"
    )
    found = answer["embeddings"]
    assert list(found) == kinds
    for index, text in enumerate(TEXTS):
        values = unit(text, 8)
        assert found["float"][index] == pytest.approx(values, abs=1e-6)
        decoded = np.frombuffer(base64.b64decode(found["base64"][index]), dtype="<f4")
        assert decoded == pytest.approx(values, abs=1e-6)
        assert found["int8"][index] == pytest.approx(values / np.abs(values).max() * 127, abs=0.51)
        assert found["uint8"][index] == [value + 128 for value in found["int8"][index]]
        bits = sum((value >= 0) << (7 - place) for place, value in enumerate(values))
        assert (found["ubinary"][index], found["binary"][index]) == ([bits], [bits - 128])
    count = sum(len(byte_level_tokenizer().encode(text).ids) for text in TEXTS)
    assert answer["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": count, "image_tokens": 0},
    }
    assert (answer["texts"], answer["response_type"]) == (TEXTS, "embeddings_by_type")


async def test_parts_of_an_input_are_one_text(start_http_router: StartHttpRouter) -> None:
    """`inputs` in place of `texts`; without embedding_types the values are floats."""
    router = await start_http_router(FakeGroup())
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = await embed(router, inputs=[{"content": parts}])
    assert answer["texts"] == ["one\ntwo"]
    assert answer["embeddings"]["float"] == [pytest.approx(unit("one\ntwo"), abs=1e-6)]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"max_tokens": 2}, slice(2)),
        ({"max_tokens": 2, "truncate": "START"}, slice(-2, None)),
        ({"max_tokens": 12, "truncate": "NONE"}, slice(None)),
        ({"max_tokens": 999}, slice(None)),
    ],
)
async def test_texts_are_cut(start_http_router: StartHttpRouter, fields: dict[str, Any], kept: slice) -> None:
    """`truncate` says which end of a text is dropped."""
    router = await start_http_router(FakeGroup())
    await embed(router, texts=["one two three"], **fields)
    ids = byte_level_tokenizer().encode("one two three").ids
    assert list(router.groups[0].submits[-1].prompt_token_ids) == ids[kept]


async def test_texts_longer_than_the_context_are_cut(start_http_router: StartHttpRouter) -> None:
    """The end is dropped unless the request says otherwise."""
    router = await start_http_router(FakeGroup())
    ids = byte_level_tokenizer().encode("a " * 900).ids
    for fields, kept in (({}, ids[:256]), ({"truncate": "START"}, ids[-256:])):
        await embed(router, texts=["a " * 900], **fields)
        assert list(router.groups[0].submits[-1].prompt_token_ids) == kept


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either texts or inputs"),
        ({"texts": ["a"], "inputs": []}, "give either texts or inputs"),
        ({"texts": []}, "give at least one text"),
        ({"texts": ["a", ""]}, "a text is empty"),
        ({"inputs": [{"content": []}]}, "a text is empty"),
        ({"images": ["data:image/png;base64,AA=="]}, "Unsupported parameter 'images'"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "inputs.0.content.0"),
        ({"texts": ["a"], "input_type": "poem"}, "Unsupported input_type 'poem'; remove it, or use one of: search_"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types.0"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["binary"]}, "set output_dimension to a multiple of 8"),
        ({"texts": ["a"], "output_dimension": 10}, "the model's embeddings have 9"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["one two three"], "truncate": "NONE", "max_tokens": 2}, "max_tokens is 2 and a text has 12 tokens"),
        ({"texts": ["a " * 900], "truncate": "NONE"}, "maximum context length"),
        ({"texts": ["a " * 900], "truncate": "NONE", "max_tokens": 99999}, "maximum context length"),
    ],
)
async def test_wrong_bodies_are_refused(start_http_router: StartHttpRouter, body: Any, message: str) -> None:
    """Each is refused with a message that names what is wrong."""
    router = await start_http_router(FakeGroup())
    assert message in (await router.expect_refusal("/v2/embed", body))["message"]


@pytest.mark.parametrize(
    ("instructions", "kind", "text"),
    [
        ({"query": "Q: ", "document": ""}, "query", "Q: a"),
        ({"query": "Q: ", "document": ""}, "search_query", "Q: a"),
        ({"query": "Q: ", "document": ""}, "search_document", "a"),
        ({"query": "Q: ", "passage": "P: "}, "search_document", "P: a"),
        ({"query": "Q: ", "corpus": "C: "}, "search_document", "C: a"),
        ({"query": "Q: "}, "search_document", "a"),
        ({"query": "Q: "}, None, "a"),
        ({}, "clustering", "a"),
    ],
)
def test_the_model_s_instruction_precedes_a_text(instructions: dict[str, str], kind: str | None, text: str) -> None:
    """input_type names one of the model's instructions, by the model's name or by Cohere's."""
    body = CohereEmbedRequest.model_validate({"texts": ["a"], "input_type": kind})
    assert [message.text for message in body.to_requests("r", instructions)] == [text]


def test_a_kind_that_the_model_lacks_is_refused() -> None:
    """Embedding such a text without an instruction would make it unlike what the client expects."""
    body = CohereEmbedRequest.model_validate({"texts": ["a"], "input_type": "clustering"})
    with pytest.raises(InvalidBody, match="use one of: query, document"):
        body.to_requests("r", {"query": "Q: ", "document": ""})


@pytest.mark.parametrize(
    ("config", "instructions"),
    [
        ('{"prompts": {"query": "Q: ", "odd": 1}}', {"query": "Q: "}),
        ('{"prompts": null}', {}),
        ("[]", {}),
        ("not JSON", {}),
        (None, {}),
    ],
)
def test_the_checkpoint_names_its_instructions(
    tmp_path: Path, config: str | None, instructions: dict[str, str]
) -> None:
    """They are the prompts of sentence-transformers' file."""
    if config is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(config)
    assert _read_instructions(tmp_path) == instructions
