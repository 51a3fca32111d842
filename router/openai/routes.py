"""OpenAIRoutes: OpenAI's endpoints, and a few of other engines', over the same core as the gRPC service.

A body becomes GenerateRequests, their events become OpenAI's objects; nothing is decided here that gRPC would decide
otherwise. It does not know how bytes are served, nor who may ask: the gate does, before anything comes here.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, NotFound
from coatcheck.proto.grammar import GrammarRefused
from coatcheck.proto.stubs.coatcheck_pb2 import DetokenizeRequest, GenerateRequest, GenerateResponse, TokenizeRequest
from coatcheck.proto.tracing import CARRIED
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.event_loop.grammar_validator import TAKES_LONG
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.http.dashboard import Dashboard
from coatcheck.router.http.disconnect import ClientDisconnected, while_connected
from coatcheck.router.http.errors import error_body, error_response, explain_validation, retry_headers
from coatcheck.router.http.json_response import AsciiJsonResponse
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.chat_response import ChatResponse
from coatcheck.router.openai.completion_request import CompletionRequest, Prompt
from coatcheck.router.openai.completion_response import CompletionResponse, ShownPrompt
from coatcheck.router.openai.large_response import LargeResponses
from coatcheck.router.openai.logprobs_format import TokenText
from coatcheck.router.openai.long_body import in_thread_if_long, long_body_route
from coatcheck.router.openai.merge_streams import begin
from coatcheck.router.openai.response_parts import ResponseHead, count_text
from coatcheck.router.openai.sse import SseStream
from coatcheck.router.openai.tokenize_request import DetokenizeBody, TokenizeBody, tokens_json
from coatcheck.router.openai.tool_parser import ToolParser, form_of
from coatcheck.router.openai.tools import Function, call_of
from coatcheck.router.serving.admin_service import AdminService
from coatcheck.router.serving.generate_service import GenerateService
from coatcheck.router.telemetry.prometheus_page import CONTENT_TYPE, PrometheusPage
from coatcheck.router.text.tokenizer import TokenizerJson

_QUOTED_RULE: Final = re.compile(r" \d+ \| ")  # with which llguidance quotes a grammar's lines
_MOST_LOGPROBS: Final = 1 << 22  # of one answer; 2.7 million make 76 MB of JSON
_PROMPT_FIELDS: Final = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


class OpenAIRoutes:
    """Made by the router; `app` is what a server serves."""

    def __init__(
        self,
        generation: GenerateService,
        admin: AdminService,
        tokenizer: TokenizerJson,
        metrics: PrometheusPage,
        side: SideProcesses,
    ) -> None:
        self._generation = generation
        self._admin = admin
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tokens = TokenText(tokenizer)
        self._large = LargeResponses(side, self._tokens)
        self._form = form_of(tokenizer.template.source if tokenizer.template is not None else "")
        # The interactive pages load scripts from elsewhere; a redirect would repeat whatever name a client has for us.
        self.app = FastAPI(
            title="Coatcheck",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            default_response_class=AsciiJsonResponse,
        )
        self.app.router.route_class = long_body_route(side)
        for method, path, endpoint in (
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/version", self.version),
        ):
            self.app.add_api_route(path, endpoint, methods=[method], response_model=None)
        for path, page in Dashboard(admin.report).endpoints.items():
            self.app.add_api_route(path, page, methods=["GET"], response_model=None, include_in_schema=False)
        for path in ("/health", "/ping"):
            self.app.add_api_route(path, self.health, methods=["GET"], response_model=None)
        self.app.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)
        self.app.add_exception_handler(RequestValidationError, _misread)
        self.app.add_exception_handler(HTTPException, _misdirected)
        self.app.add_exception_handler(ClientDisconnected, _nobody)
        self.app.add_exception_handler(CoatcheckError, _refused)
        self.app.add_exception_handler(UnicodeEncodeError, _refused)
        self.app.add_exception_handler(Exception, _refused)  # the connection of such a one is closed

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """Goes on from one or several prompts."""
        prompts = await in_thread_if_long(request, body.prompts)
        name: str = request.scope["request_id"]
        if body.return_token_ids or body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            ids = [await self._ids(prompt, body.model) for prompt in prompts]
            known = ids
            messages = await in_thread_if_long(request, lambda: body.messages(known, name))
        else:
            ids = [[] for _ in prompts]
            messages = await in_thread_if_long(request, lambda: body.messages(prompts, name))
        echoes = [await self._echo(prompt) if body.echo else "" for prompt in prompts]
        shown = [
            ShownPrompt(echo, known, isinstance(prompt, str))
            for echo, known, prompt in zip(echoes, ids, prompts, strict=True)
        ]
        without = body.model_copy(update={"prompt": ""})  # what goes to a side process, or waits for its answer
        answer = CompletionResponse(self._head(f"cmpl-{name}"), without, shown, self._tokens)
        return await self._answer(request, messages, answer, stream=body.stream)

    async def chat_completions(self, request: Request, body: ChatRequest) -> Response:
        """Speaks the assistant's next turn."""
        name: str = request.scope["request_id"]
        message = await in_thread_if_long(request, lambda: body.message(name, self._form))
        known: Sequence[int] = ()
        if body.return_token_ids:
            asked = TokenizeRequest(model=body.model, chat=message.chat)
            known = await self._generation.tokenize_prompt(asked)
        answer = ChatResponse(self._head(f"chatcmpl-{name}"), body, self._tokens, self._tool_calls(body), known)
        try:
            return await self._answer(request, [message], answer, stream=body.stream)
        except GrammarRefused as refused:
            if functions := body.constrained():
                raise await self._schema_refused(functions, refused) from None
            raise

    async def _schema_refused(self, functions: list[tuple[str, Function]], refused: GrammarRefused) -> InvalidRequest:
        """Of functions whose grammar is refused: an error that names the first whose schema alone is."""
        for place, function in functions if not refused.reason.startswith(TAKES_LONG) else ():
            try:
                await self._generation.check_grammar(call_of(function))
            except GrammarRefused as error:
                return InvalidRequest(
                    f"{place}.parameters, of {function.name!r}, cannot be kept to: {error.reason}; change this schema, "
                    "or set tool_choice to auto and leave strict out"
                )
        reason = _QUOTED_RULE.split(refused.reason)[0]
        return InvalidRequest(
            f"the schemas of {len(functions)} tools together cannot be kept to: {reason}; send fewer tools, or simpler "
            "schemas"
        )

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """By its name."""
        if name != self._generation.model_name:
            raise NotFound(f"model {name!r} is not served here; this server has {self._generation.model_name!r}")
        return self._model()

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """A text's or a chat's token ids."""
        asked = await in_thread_if_long(request, body.message)
        found = await self._generation.tokenize(asked)
        most = self._generation.model.max_model_len if self._generation.model else None
        tokens = self._tokens if body.return_token_strs else None
        return await self._large.response(len(found.token_ids), tokens_json, found, most, tokens)

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        asked = await in_thread_if_long(request, body.message)
        text = (await self._generation.detokenize(asked)).text
        return await self._large.response(count_text(text), dict, prompt=text)

    async def health(self) -> Response:
        """200 while a new request would be taken."""
        state = self._admin.state
        return AsciiJsonResponse({"status": state}, 200 if state == "serving" else 503)

    async def version(self) -> dict[str, str]:
        """Of this package."""
        return {"version": version("coatcheck")}

    async def metrics(self) -> Response:
        """In Prometheus' text form."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def _answer(
        self,
        request: Request,
        messages: Sequence[GenerateRequest],
        answer: CompletionResponse | ChatResponse,
        *,
        stream: bool,
    ) -> Response:
        tenant: Tenant = request.scope["tenant"]
        carrier = carrier_of(request)
        self._check_logprobs(messages, stream=stream)
        if not stream:
            responses = await while_connected(request.receive, self._all(messages, tenant, carrier))
            return await self._large.whole(answer, responses)
        generate = self._generation.generate_stream
        admitted = asyncio.Semaphore(0)
        sources = [
            generate(message, tenant=tenant, carrier=carrier, on_admitted=admitted.release) for message in messages
        ]
        return SseStream(await while_connected(request.receive, begin(sources, admitted)), answer, self._large)

    def _check_logprobs(self, messages: Sequence[GenerateRequest], *, stream: bool) -> None:
        """Raises InvalidRequest for more log-probabilities in one answer than the router may hold until it is whole."""
        most_tokens = self._generation.model.max_model_len if self._generation.model else 0
        asked = 0
        for message in messages:
            sampling = message.sampling
            n = sampling.n or 1
            if sampling.HasField("prompt_logprobs"):
                asked += n * len(message.token_ids.ids) * (sampling.prompt_logprobs + 1)
            if sampling.HasField("logprobs") and not stream:
                asked += n * min(sampling.max_tokens or most_tokens, most_tokens) * (sampling.logprobs + 1)
        if asked > _MOST_LOGPROBS:
            raise InvalidRequest(
                f"the answer could have {asked:,} log-probabilities, and {_MOST_LOGPROBS:,} are the most; ask for less "
                "with logprobs, n or max_tokens, or send fewer prompts in a request"
            )

    async def _all(
        self, messages: Sequence[GenerateRequest], tenant: Tenant, carrier: Mapping[str, str]
    ) -> list[GenerateResponse]:
        generate = self._generation.generate
        tasks: list[asyncio.Task[GenerateResponse]] = []
        try:
            for message in messages:
                tasks.append(asyncio.create_task(generate(message, tenant=tenant, carrier=carrier)))
                await asyncio.sleep(0)  # a thousand prompts that begin in one round would block the event loop
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ids(self, text: Prompt, model: str) -> list[int]:
        if not isinstance(text, str):
            return text
        if not text:
            raise InvalidRequest("the prompt is empty; give at least one token")
        asked = TokenizeRequest(model=model, text=text)
        return await self._generation.tokenize_prompt(asked)

    async def _echo(self, text: Prompt) -> str:
        if isinstance(text, str):
            return text
        asked = DetokenizeRequest(token_ids=text, skip_special_tokens=False)  # an echo includes special tokens
        return (await self._generation.detokenize(asked)).text

    def _tool_calls(self, body: ChatRequest) -> Callable[[], ToolParser] | None:
        called, most = body.called, None if body.parallel_tool_calls else 1
        if not called:
            return None
        if called == "named":
            return partial(ToolParser, "named", name=body.named, most=most)
        form = "required" if called == "required" else self._form
        return partial(ToolParser, form, most=most)

    def _head(self, name: str) -> ResponseHead:
        model = self._generation.model
        return ResponseHead(name, self._generation.model_name, f"fp_{model.fingerprint[:12]}" if model else "")

    def _model(self) -> dict[str, Any]:
        model = self._generation.model
        return {
            "id": self._generation.model_name,
            "object": "model",
            "created": self._generation.created,
            "owned_by": "coatcheck",
            "root": self._generation.model_name,
            "parent": None,
            "max_model_len": model.max_model_len if model else None,
            "default_sampling": self._generation.defaults.given_values(),
        }


def carrier_of(request: Request) -> Mapping[str, str]:
    """The client's trace context."""
    return {name: request.headers[name] for name in CARRIED if name in request.headers}


async def _refused(request: Request, error: Exception) -> Response:
    status, body = error_body(error, _PROMPT_FIELDS.get(request.url.path))
    return AsciiJsonResponse(body, status, headers=retry_headers(error))


async def _misread(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, field = explain_validation(error.errors())
    return error_response(400, message, param=field)


async def _misdirected(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    said = {404: f"{what} is no endpoint of this server", 405: f"{what}: this endpoint has another method"}
    response = error_response(error.status_code, said.get(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log alone: there is nobody to read it
