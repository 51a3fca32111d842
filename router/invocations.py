"""POST /invocations, which Amazon SageMaker calls. The fields of the body select the endpoint that answers."""

from collections.abc import Callable
from typing import Any, Final

from fastapi import Request
from pydantic import model_validator
from starlette.responses import Response

from coatcheck.proto.errors import InvalidRequest
from coatcheck.router.embeddings.embedding_request import EmbeddingRequest
from coatcheck.router.embeddings.routes import EmbeddingRoutes
from coatcheck.router.embeddings.score_request import RerankRequest, ScoreRequest
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.completion_request import CompletionRequest
from coatcheck.router.openai.routes import OpenAIRoutes
from coatcheck.router.openai.sampling_fields import RequestBody

# Field -> type of the body. The first of these fields that the body has decides.
_KINDS: Final[dict[str, type[RequestBody]]] = {
    "messages": ChatRequest,
    "prompt": CompletionRequest,
    "input": EmbeddingRequest,
    "query": RerankRequest,
    **dict.fromkeys(("text_1", "queries", "data_1"), ScoreRequest),
}


class Invocation(RequestBody):
    """Validates a body as the type that its fields select. No object of this class itself is made."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_kind(cls, value: Any, _: Callable[[Any], Any]) -> Any:
        """Raises InvalidRequest if the body has none of the fields in _KINDS."""
        if isinstance(value, RequestBody):  # validated already: see BodyRoute
            return value
        if not isinstance(value, dict):
            return ChatRequest.model_validate(value)  # which says that it must be an object
        kind = next((kind for name, kind in _KINDS.items() if value.get(name) is not None), None)
        if kind is None:
            raise InvalidRequest(
                "the body has none of messages, prompt, input, query and text_1, by which /invocations selects an "
                "endpoint; add one"
            )
        return kind.model_validate(value)


class InvocationRoutes:
    """Adds its endpoint to the application of `openai`."""

    def __init__(self, openai: OpenAIRoutes, embeddings: EmbeddingRoutes) -> None:
        self._openai = openai
        self._embeddings = embeddings
        # Not in /openapi.json, which has each body at its own endpoint.
        openai.app.add_api_route(
            "/invocations", self.invoke, methods=["POST"], response_model=None, include_in_schema=False
        )

    async def invoke(self, request: Request, body: Invocation) -> Response:
        """Responds as the endpoint whose body `body` is."""
        given: RequestBody = body
        match given:
            case ChatRequest():
                return await self._openai.chat_completions(request, given)
            case CompletionRequest():
                return await self._openai.completions(request, given)
            case EmbeddingRequest():
                return await self._embeddings.embeddings(request, given)
            case RerankRequest():
                return await self._embeddings.rerank(request, given)
            case ScoreRequest():
                return await self._embeddings.score(request, given)
        raise AssertionError(type(given))
