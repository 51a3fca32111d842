"""POST /invocations, which Amazon SageMaker calls: a request to one of the other endpoints, which its fields tell."""

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

# Which field of a body tells its kind. The first that the body has counts.
_KINDS: Final[dict[str, type[RequestBody]]] = {
    "messages": ChatRequest,
    "prompt": CompletionRequest,
    "input": EmbeddingRequest,
    "query": RerankRequest,
    **dict.fromkeys(("text_1", "queries", "data_1"), ScoreRequest),
}


class Invocation(RequestBody):
    """Validates to a body of the kind that the fields tell; there are no objects of this class."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate_kind(cls, value: Any, _: Callable[[Any], Any]) -> Any:
        """Raises InvalidRequest if no field tells the kind."""
        if isinstance(value, RequestBody):  # validated already: see BodyRoute
            return value
        if not isinstance(value, dict):
            return ChatRequest.model_validate(value)  # which says that it must be an object
        kind = next((kind for name, kind in _KINDS.items() if value.get(name) is not None), None)
        if kind is None:
            raise InvalidRequest(
                "the body has no messages, prompt, input, query or text_1, which tell what /invocations does; add one"
            )
        return kind.model_validate(value)


class InvocationRoutes:
    """Adds its endpoint to the application of `openai`."""

    def __init__(self, openai: OpenAIRoutes, embeddings: EmbeddingRoutes) -> None:
        self._openai = openai
        self._embeddings = embeddings
        # /openapi.json has the bodies at the endpoints that they belong to.
        openai.app.add_api_route(
            "/invocations", self.invoke, methods=["POST"], response_model=None, include_in_schema=False
        )

    async def invoke(self, request: Request, body: Invocation) -> Response:
        """Responds as the endpoint that `body` belongs to."""
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
