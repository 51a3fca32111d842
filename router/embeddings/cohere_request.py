"""CohereEmbedRequest: the body of POST /v2/embed, Cohere's API of embeddings, and its response."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field

from coatcheck.proto.errors import InvalidParameter, InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import EmbedRequest, EmbedResponse
from coatcheck.router.embeddings.embedding_request import PoolingFields, to_base64
from coatcheck.router.http.errors import InvalidBody
from coatcheck.router.openai.chat_request import TextPart
from coatcheck.router.openai.completion_request import MAX_PROMPTS
from coatcheck.router.openai.sampling_fields import RequestBody

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# Cohere's own values of input_type. Each has the names under which sentence-transformers' models may have the
# instruction.
_INPUT_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "search_document": ("search_document", "document", "passage", "corpus"),
    "search_query": ("search_query", "query"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class CohereInput(RequestBody):
    """The texts of `content` are one input, each on a line of its own."""

    content: Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class CohereEmbedRequest(PoolingFields):
    """`truncate`: which end of a text that is longer than `max_tokens`, or than the context, is dropped."""

    texts: Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)] | None = None
    inputs: Annotated[list[CohereInput], Field(fail_fast=True, max_length=MAX_PROMPTS)] | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, max_length=6)] = ["float"]  # noqa: RUF012
    output_dimension: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    dropped_end: Literal["NONE", "START", "END"] = Field("END", validation_alias="truncate")

    def to_requests(self, request_id: str, instructions: Mapping[str, str]) -> list[EmbedRequest]:
        """One EmbedRequest for each text. `instructions`: the prefix that the model expects before a text, by the kind
        of the text. Raises InvalidRequest."""
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("give either texts or inputs")
        texts = self._texts()
        if not texts or not all(texts):
            raise InvalidRequest("a text is empty; give at least one text, and each at least one token")
        instruction = self._instruction(instructions)
        fields = {"dimensions": self.output_dimension} if self.output_dimension else {}
        return self.to_embed_requests([instruction + text for text in texts], request_id, **fields)

    def kept_tokens(self, index: int) -> int | None:
        """See PoolingFields."""
        if self.max_tokens is not None:
            return self.max_tokens
        return None if self.dropped_end == "NONE" else -1

    @property
    def keeps_last(self) -> bool:
        """See PoolingFields."""
        return self.dropped_end == "START"

    def truncate(self, message: EmbedRequest, token_ids: Sequence[int], count: int, max_tokens: int) -> EmbedRequest:
        """See PoolingFields. With "NONE" a text of more than `count` tokens raises InvalidParameter."""
        if self.dropped_end != "NONE":
            return super().truncate(message, token_ids, count, max_tokens)
        if len(token_ids) > count:
            raise InvalidParameter(
                "max_tokens",
                f"is {count} and a text has {len(token_ids)} tokens; shorten the text, or set truncate to START or END",
            )
        return message

    def make_response(self, response_id: str, embedded: Sequence[EmbedResponse]) -> dict[str, Any]:
        """Cohere's embeddings by type. Raises InvalidParameter if they cannot be packed into bits."""
        values = np.array([one.embedding for one in embedded], dtype=np.float32)
        return {
            "id": response_id,
            "embeddings": {kind: _convert(values, kind) for kind in self.embedding_types},
            "texts": self._texts(),
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": sum(one.prompt_tokens for one in embedded), "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }

    def _texts(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in one.content) for one in self.inputs or ()]

    def _instruction(self, instructions: Mapping[str, str]) -> str:
        """The text to put before each input, by `input_type`; "" if it is not set. "" also for Cohere's own names if
        the model has no instructions, and for "search_document" if it has none for documents. Raises InvalidBody for
        any other name that the model's instructions lack."""
        kind = self.input_type
        if kind is None:
            return ""
        for name in (kind, *_INPUT_TYPES.get(kind, ())):
            if name in instructions:
                return instructions[name]
        if kind == "search_document" or (not instructions and kind in _INPUT_TYPES):
            return ""
        names = ", ".join(instructions or _INPUT_TYPES)
        raise InvalidBody(f"Unsupported input_type {kind[:80]!r}; remove it, or use one of: {names}", "input_type")


def _convert(values: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", kind: EmbeddingType) -> list[Any]:
    """The rows of `values` as embeddings of the type `kind`. Integers are the values of a row, scaled so that the
    largest magnitude is 127. Bits are 1 for values that are not negative; the first value is the highest bit of the
    first byte."""
    converted: np.ndarray[tuple[int, int], np.dtype[Any]]
    match kind:
        case "base64":
            return [to_base64(row.tolist()) for row in values]
        case "float":
            converted = values
        case "int8" | "uint8":
            largest = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12)
            rounded = np.rint(values * (127 / largest)).astype(np.int16)
            converted = rounded + (128 if kind == "uint8" else 0)
        case "binary" | "ubinary":
            if values.shape[1] % 8:
                raise InvalidParameter(
                    "embedding_types",
                    f"asks for {kind}, which packs eight values into a byte, but an embedding has {values.shape[1]}; "
                    "set output_dimension to a multiple of 8",
                )
            packed = np.packbits(values >= 0, axis=1).astype(np.int16)
            converted = packed - (128 if kind == "binary" else 0)
    made: list[Any] = converted.tolist()
    return made
