"""OpenAIRoutes: the HTTP endpoints of OpenAI's API and a few of vLLM's, over the same GenerateService as gRPC.

A body becomes one GenerateRequest for each prompt, and the service's events become OpenAI's objects. The middleware
(http/middleware.py) authenticates the client before.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, PermissionDenied
from coatcheck.proto.grammar import GrammarRefused
from coatcheck.proto.stubs.coatcheck_pb2 import DetokenizeRequest, TokenizeRequest
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.dashboard import Dashboard
from coatcheck.router.http.errors import error_response, report_error, report_refusal
from coatcheck.router.http.json_response import AsciiJsonResponse
from coatcheck.router.http.openapi import ApiApp
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.chat_response import ChatResponse
from coatcheck.router.openai.chat_runner import ChatRunner
from coatcheck.router.openai.completion_request import CompletionRequest, Prompt, split_prompts
from coatcheck.router.openai.completion_response import CompletionResponse
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.request_body import body_route, in_thread_if_long
from coatcheck.router.openai.responder import Responder
from coatcheck.router.openai.response_parts import EchoedPrompt, count_text
from coatcheck.router.openai.response_sender import ClientDisconnected, LargeResponses
from coatcheck.router.openai.sampling_fields import SamplingFields, StreamOptions
from coatcheck.router.openai.tokenize_request import DetokenizeBody, TokenizeBody, tokenize_response, tokenizer_info
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.serving.admin_service import AdminService
from coatcheck.router.serving.generate_service import GenerateService
from coatcheck.router.serving.request_validation import check_model_name
from coatcheck.router.telemetry.prometheus_page import CONTENT_TYPE, PrometheusPage
from coatcheck.router.text.tokenizer import TokenizerJson

_ANTHROPIC_HEADER: Final = "anthropic-version"  # Anthropic's clients send it with every request


class OpenAIRoutes:
    """`app` is the ASGI application. `chats` runs chats, and `large` makes responses, for this API and others."""

    def __init__(
        self,
        generation: GenerateService,
        admin: AdminService,
        tokenizer: TokenizerJson,
        metrics: PrometheusPage,
        side: SideProcesses,
        planner: OutputPlanner,
        *,
        has_tokenizer_info: bool,
        forces_usage: bool = False,
    ) -> None:
        """`has_tokenizer_info`: GET /tokenizer_info is served. `forces_usage`: every chunk of a stream has the
        usage so far."""
        self._forces_usage = forces_usage
        self._generation = generation
        self._admin = admin
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._formatter = LogprobsFormatter(tokenizer)
        self.large = LargeResponses(side)
        self._responder = Responder(generation, self.large)
        self.chats = ChatRunner(generation, planner, self._responder, self._formatter)
        # docs_url and redoc_url would load scripts from other hosts. A redirect would repeat the Host header.
        self.app = ApiApp(
            title="Coatcheck",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            default_response_class=AsciiJsonResponse,
        )
        self.app.router.route_class = body_route(side)
        for method, path, endpoint in (
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/version", self.version),
            ("GET", "/load", self.load),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
        ):
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)
        if has_tokenizer_info:
            self.app.add_api_route("/tokenizer_info", self.tokenizer_info, methods=["GET"], response_model=None)
        for path, page in Dashboard(admin.report).endpoints.items():
            self.app.add_api_route(path, page, methods=["GET"], response_model=None, include_in_schema=False)
        for path in ("/health", "/ping"):
            self.app.add_api_route(path, self.health, methods=["GET"], response_model=None)
        self.app.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)
        self.app.add_exception_handler(HTTPException, _handle_http_exception)
        self.app.add_exception_handler(ClientDisconnected, _handle_disconnect)
        self.app.add_exception_handler(CoatcheckError, _handle_error)
        self.app.add_exception_handler(UnicodeEncodeError, _handle_error)
        self.app.add_exception_handler(Exception, _handle_error)  # Starlette closes the connection after it

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Completes one or several prompts."""
        request_id: str = request.scope["request_id"]
        self._add_usage(body)
        prompts = split_prompts(body.prompt)
        needs_ids = (
            body.return_token_ids
            or body.prompt_logprobs is not None
            or (body.echo and body.logprobs is not None)
            or body.truncate_prompt_tokens is not None
        )
        token_ids = [await self._tokenize(prompt, body) if needs_ids else [] for prompt in prompts]
        if body.truncate_prompt_tokens is not None:
            token_ids = [body.truncate(ids, body.max_tokens, self.chats.max_model_len) for ids in token_ids]
            prompts = list[Prompt](token_ids)
        sources: Sequence[Prompt] = token_ids if needs_ids else prompts
        generate_requests = await in_thread_if_long(request, lambda: body.to_generate_requests(sources, request_id))
        echoed = [
            EchoedPrompt(await self._echo(prompt) if body.echo else "", ids, isinstance(prompt, str))
            for prompt, ids in zip(prompts, token_ids, strict=True)
        ]
        options = body.model_copy(update={"prompt": ""})  # without the prompt it is small to keep and to pickle
        renderer = CompletionResponse(
            self.chats.response_head(f"cmpl-{request_id}", body.model), options, echoed, self._formatter_of(body)
        )
        try:
            return await self._responder.respond(request, generate_requests, renderer, stream=body.stream)
        except GrammarRefused as refused:
            raise body.explain_refused_grammar(refused) from None

    async def chat_completions(self, request: Request, body: ChatRequest) -> Response:
        """Generates the assistant's next message."""
        self._add_usage(body)
        head = self.chats.response_head(f"chatcmpl-{request.scope['request_id']}", body.model)
        return await self.chats.run(
            request, body, lambda plan, token_ids: ChatResponse(head, body, self._formatter_of(body), plan, token_ids)
        )

    async def models(self, request: Request) -> dict[str, Any]:
        """Lists the names of the model that is served, and its LoRA adapters. Clients of Anthropic, which send the
        header anthropic-version, get the list in Anthropic's form."""
        names = self._generation.config.model_names
        models = [self._model_object(name) for name in names]
        if _ANTHROPIC_HEADER not in request.headers:
            return {"object": "list", "data": models}
        shown = [_anthropic_model(model) for model in models]
        return {"data": shown, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        """Describes the model that is served, by one of its names, or one of its LoRA adapters. See `models`."""
        if not name:  # /v1/models/
            return await self.models(request)
        check_model_name(name, self._generation.config.model_names)
        model = self._model_object(name)
        return _anthropic_model(model) if _ANTHROPIC_HEADER in request.headers else model

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Returns the token ids of a text or a chat."""
        message = await in_thread_if_long(request, body.to_proto)
        found = await self._generation.tokenize(message)
        max_model_len = self._generation.model.max_model_len if self._generation.model else None
        formatter = self._formatter if body.return_token_strs else None
        return await self.large.make_json(len(found.token_ids), tokenize_response, found, max_model_len, formatter)

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """Returns the text of token ids."""
        message = await in_thread_if_long(request, body.to_proto)
        text = (await self._generation.detokenize(message)).text
        return await self.large.make_json(count_text(text), dict, prompt=text)

    async def tokenizer_info(self) -> dict[str, Any]:
        """Returns the tokenizer's configuration and the chat template, in vLLM's form."""
        return tokenizer_info(self._tokenizer)

    async def health(self) -> Response:
        """Responds 200 if a new request would be accepted, else 503."""
        state = self._admin.state
        return AsciiJsonResponse({"status": state}, 200 if state == "serving" else 503)

    async def load(self) -> dict[str, int]:
        """Returns the number of open requests, in vLLM's form."""
        return {"server_load": self._admin.open_requests}

    async def reset_prefix_cache(self, request: Request) -> dict[str, list[str]]:
        """Makes every group evict the cached blocks that no running request uses. Returns the groups' names. Refuses
        requests of web pages, because a browser lets any page send this request."""
        if "origin" in request.headers:
            raise PermissionDenied("web pages must not reset caches; send the request without the header origin")
        return {"groups": self._admin.reset_prefix_caches()}

    async def version(self) -> dict[str, str]:
        """Returns the version of this package."""
        return {"version": version("coatcheck")}

    async def metrics(self) -> Response:
        """Returns the metrics in Prometheus' text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def _tokenize(self, prompt: Prompt, body: CompletionRequest) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token")
        tokenize = TokenizeRequest(model=body.model, text=prompt)
        if body.truncate_prompt_tokens is not None:  # it may be longer than the context
            return list((await self._generation.tokenize(tokenize)).token_ids)
        return await self._generation.tokenize_prompt(tokenize)

    async def _echo(self, prompt: Prompt) -> str:
        """The prompt's text, including special tokens."""
        if isinstance(prompt, str):
            return prompt
        message = DetokenizeRequest(token_ids=prompt, skip_special_tokens=False)
        return (await self._generation.detokenize(message)).text

    def _add_usage(self, body: SamplingFields) -> None:
        """With `forces_usage`, asks for the usage in every chunk of a stream, whatever the request asks for."""
        if self._forces_usage and body.stream:
            body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)

    def _formatter_of(self, body: SamplingFields) -> LogprobsFormatter:
        return self._formatter.with_ids() if body.return_tokens_as_token_ids else self._formatter

    def _model_object(self, name: str) -> dict[str, Any]:
        model, adapter = self._generation.model, self._generation.config.lora_modules.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._generation.created,
            "owned_by": "coatcheck",
            "root": self._generation.model_name if adapter is None else adapter,
            "parent": None if adapter is None else self._generation.model_name,
            "max_model_len": model.max_model_len if model else None,
            "default_sampling": self._generation.defaults.given_values(),
        }


def _anthropic_model(model: dict[str, Any]) -> dict[str, Any]:
    """A model object in Anthropic's form."""
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


async def _handle_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    return error_response(report_error(error, path), path)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    endpoint = f"{request.method} {request.url.path}"
    messages = {404: f"unknown endpoint {endpoint}{_endpoint_hint(request)}", 405: f"{endpoint}: method not allowed"}
    message = messages.get(error.status_code, str(error.detail))
    response = error_response(report_refusal(error.status_code, message), request.url.path)
    response.headers.update(error.headers or {})
    return response


def _endpoint_hint(request: Request) -> str:
    """What to send instead of an unknown path. If the base URL lacks /v1, has it twice, or has a slash too many: the
    endpoint that the client means. For an endpoint that is off: the flag that turns it on. Else ""."""
    path = "/" + "/".join(filter(None, request.url.path.split("/")))
    if path == "/tokenizer_info":
        return "; it needs serve --enable-tokenizer-info-endpoint"
    known = {getattr(route, "path", "") for route in request.app.routes}
    candidates = (path, f"/v1{path}", path.removeprefix("/v1"))
    found = next((candidate for candidate in candidates if candidate in known), None)
    return f"; use {found}" if found and found != request.url.path else ""


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # not sent: the client has disconnected
