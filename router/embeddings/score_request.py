"""The bodies of POST /v1/score and POST /rerank, and their responses: the cosine similarity of two texts' embeddings.

The names of the fields are vLLM's, and for /rerank also Jina's and Cohere's.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import EmbedRequest, EmbedResponse
from coatcheck.router.embeddings.embedding_request import TruncationFields, usage_of
from coatcheck.router.openai.completion_request import MAX_PROMPTS
from coatcheck.router.openai.sampling_fields import Count, RequestBody

_Texts = str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(TruncationFields):
    """`text_1`: one text, which is compared with each of `text_2`; or as many texts as `text_2`, compared pairwise."""

    text_1: Annotated[_Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[_Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))]

    def to_requests(self, request_id: str) -> list[EmbedRequest]:
        """One EmbedRequest for each text: those of `text_1`, then those of `text_2`. Raises InvalidRequest."""
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; text_1 must have one, or as many as text_2"
            )
        return self.to_embed_requests(_not_empty([*first, *second]), request_id)

    def make_response(self, response_id: str, model: str, created: int, embedded: Sequence[EmbedResponse]) -> Any:
        """vLLM's list of scores, one for each of `text_2`."""
        second = embedded[-len(_as_list(self.text_2)) :]
        first = embedded[: len(embedded) - len(second)]
        pairs = zip([*first] * len(second) if len(first) == 1 else first, second, strict=True)
        return {
            "id": response_id,
            "object": "list",
            "created": created,
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": cosine(one, other)}
                for index, (one, other) in enumerate(pairs)
            ],
            "usage": usage_of(embedded),
        }


class TextDocument(RequestBody):
    text: str


class RerankRequest(TruncationFields):
    """`top_n`: how many of the documents are returned; 0 for all. `max_tokens_per_doc` is Cohere's."""

    query: str
    documents: Annotated[list[str | TextDocument], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    top_n: Count = 0
    max_tokens_per_doc: Annotated[Count, Field(description="The first tokens of each document are kept; 0: all.")] = 0
    return_documents: bool = True

    def to_requests(self, request_id: str) -> list[EmbedRequest]:
        """One EmbedRequest for the query, then one for each document. Raises InvalidRequest."""
        return self.to_embed_requests(_not_empty([self.query, *self._texts()]), request_id)

    def kept_tokens(self, index: int) -> int | None:
        """See PoolingFields. Prompt 0 is the query."""
        counts = [self.truncate_prompt_tokens, self.max_tokens_per_doc if index else None]
        found = [count for count in counts if count and count > 0]
        return min(found) if found else self.truncate_prompt_tokens

    def make_response(self, response_id: str, model: str, created: int, embedded: Sequence[EmbedResponse]) -> Any:
        """The documents with the highest scores, highest first."""
        query, *documents = embedded
        scores = [cosine(query, document) for document in documents]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in order[: self.top_n or None]
        ]
        if self.return_documents:
            texts = self._texts()
            results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
        return {"id": response_id, "model": model, "results": results, "usage": usage_of(embedded)}

    def _texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


def cosine(one: EmbedResponse, other: EmbedResponse) -> float:
    """The cosine similarity of two normalized embeddings, clamped to [-1, 1]: by rounding, equal texts could exceed
    1."""
    found = sum(a * b for a, b in zip(one.embedding, other.embedding, strict=True))
    return min(max(found, -1.0), 1.0)


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _not_empty(texts: list[str]) -> list[str]:
    if not all(texts):
        raise InvalidRequest("a text is empty; give each text at least one token")
    return texts
