"""EmbeddingRoutes: the HTTP endpoints of embeddings, and of scores and reranking, which are computed from
embeddings."""

import time
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from coatcheck.proto.stubs.coatcheck_pb2 import EmbedRequest, EmbedResponse, TokenizeRequest
from coatcheck.proto.tracing import TRACE_CONTEXT_HEADERS
from coatcheck.router.embeddings.cohere_request import CohereEmbedRequest
from coatcheck.router.embeddings.embedding_request import EmbeddingRequest, PoolingFields, embedding_response
from coatcheck.router.embeddings.score_request import RerankRequest, ScoreRequest
from coatcheck.router.openai.request_body import in_thread_if_long
from coatcheck.router.openai.responder import run_all
from coatcheck.router.openai.response_sender import LargeResponses, while_connected
from coatcheck.router.serving.embed_service import EmbedService
from coatcheck.router.serving.generate_service import CallOptions, GenerateService


class EmbeddingRoutes:
    """Adds its endpoints to `app`."""

    def __init__(self, app: FastAPI, service: EmbedService, generation: GenerateService, large: LargeResponses) -> None:
        self._service = service
        self._generation = generation
        self._large = large
        app.add_api_route("/v1/embeddings", self.embeddings, methods=["POST"], response_model=None)
        app.add_api_route("/v2/embed", self.embed_for_cohere, methods=["POST"], response_model=None)
        app.add_api_route("/v1/score", self.score, methods=["POST"], response_model=None)
        app.add_api_route("/score", self.score, methods=["POST"], response_model=None, include_in_schema=False)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            app.add_api_route(
                path, self.rerank, methods=["POST"], response_model=None, include_in_schema=path == "/rerank"
            )

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        """Returns the embedding of each input."""
        request_id: str = request.scope["request_id"]
        messages = await in_thread_if_long(request, lambda: body.to_requests(request_id))
        embedded = await self._embed(request, body, messages)
        values = sum(len(one.embedding) for one in embedded) if body.encoding_format == "float" else len(embedded)
        return await self._large.make_json(
            values,
            embedding_response,
            f"embd-{request_id}",
            self._generation.config.response_name(body.model),
            int(time.time()),
            body.encoding_format,
            embedded,
        )

    async def embed_for_cohere(self, request: Request, body: CohereEmbedRequest) -> Response:
        """Returns the embedding of each text, in Cohere's form."""
        request_id: str = request.scope["request_id"]
        instructions = self._service.instructions
        messages = await in_thread_if_long(request, lambda: body.to_requests(request_id, instructions))
        embedded = await self._embed(request, body, messages)
        values = sum(len(one.embedding) for one in embedded) * len(body.embedding_types)
        return await self._large.make_json(values, body.make_response, f"embd-{request_id}", embedded)

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """Scores how similar texts are."""
        return await self._compare(request, body, "score")

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Orders documents by how similar they are to a query."""
        return await self._compare(request, body, "rerank")

    async def _compare(self, request: Request, body: ScoreRequest | RerankRequest, prefix: str) -> Response:
        request_id: str = request.scope["request_id"]
        messages = await in_thread_if_long(request, lambda: body.to_requests(request_id))
        embedded = await self._embed(request, body, messages)
        values = sum(len(one.embedding) for one in embedded)
        return await self._large.make_json(
            values,
            body.make_response,
            f"{prefix}-{request_id}",
            self._generation.config.response_name(body.model),
            int(time.time()),
            embedded,
        )

    async def _embed(
        self, request: Request, body: PoolingFields, messages: Sequence[EmbedRequest]
    ) -> list[EmbedResponse]:
        """The embeddings of all messages; the first error cancels the others."""
        trace_context = {name: request.headers[name] for name in TRACE_CONTEXT_HEADERS if name in request.headers}
        options = CallOptions(request.scope["tenant"], trace_context)
        calls = [partial(self._embed_one, body, index, message, options) for index, message in enumerate(messages)]
        return await while_connected(request.receive, run_all(calls))

    async def _embed_one(
        self, body: PoolingFields, index: int, message: EmbedRequest, options: CallOptions
    ) -> EmbedResponse:
        count = body.kept_tokens(index)
        is_plain = message.HasField("text") and not body.adds_special_tokens
        if count is None and not is_plain:
            return await self._service.embed(message, options)
        token_ids: Sequence[int] = message.token_ids.ids
        if not message.HasField("token_ids"):
            prompt = TokenizeRequest(text=message.text, add_special_tokens=body.adds_special_tokens)
            if message.HasField("chat"):
                prompt = TokenizeRequest(chat=message.chat)
            token_ids = (await self._generation.tokenize(prompt)).token_ids
        most = self._generation.max_sequence_tokens or len(token_ids)
        if count is None:
            count = len(token_ids)
            most = max(most, count)  # not truncated: `embed` refuses a prompt that is longer than the context
        return await self._service.embed(body.truncate(message, list(token_ids), count, most), options)
