"""ChatRunner: runs the chats of all HTTP APIs. Each API translates its body into a ChatRequest, and brings the
ResponseRenderer that makes its response."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

from fastapi import Request
from starlette.responses import Response

from coatcheck.proto.errors import InvalidParameter
from coatcheck.proto.grammar import GrammarRefused
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, TokenizeRequest
from coatcheck.router.event_loop.grammar_validator import TAKES_LONG
from coatcheck.router.http.errors import InvalidBody
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.openai.request_body import in_thread_if_long
from coatcheck.router.openai.responder import Responder
from coatcheck.router.openai.response_parts import ResponseHead
from coatcheck.router.openai.response_sender import ResponseRenderer
from coatcheck.router.openai.tools import Function
from coatcheck.router.parsing.output_parser import ParsingPlan
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.parsing.reasoning_parser import ReasoningStart
from coatcheck.router.serving.generate_service import GenerateService
from coatcheck.router.text.reasoning_variables import ReasoningVariables
from coatcheck.router.tool_grammars.call_grammar import named_call_grammar
from coatcheck.router.tool_grammars.input_grammar import CustomFunction

_QUOTED_LINE: Final = re.compile(r" \d+ \| ")  # how llguidance quotes a line of a grammar

_UNKNOWN_VARIABLES: Final = ReasoningVariables(None)  # of a client's template

MakeRenderer = Callable[[ParsingPlan, list[int]], ResponseRenderer]  # takes the plan, and the prompt's token ids or []


class ChatRunner:
    """One for each router. `formatter`: of log-probabilities."""

    def __init__(
        self,
        generation: GenerateService,
        planner: OutputPlanner,
        responder: Responder,
        formatter: LogprobsFormatter,
    ) -> None:
        self._generation = generation
        self.formatter = formatter
        self._planner = planner
        self._responder = responder

    async def run(self, request: Request, body: ChatRequest, make_renderer: MakeRenderer) -> Response:
        """Generates the next message of the chat. `make_renderer` makes what renders the response."""
        plan = self._make_plan(body)
        generate_request = await self._translate(request, body, plan)
        if body.reasoning_limit is not None:
            limit = self._planner.reasoning_limit(body.reasoning_limit, plan.reasoning_start)
            if limit is not None:
                generate_request.sampling.reasoning_limit.CopyFrom(limit.to_message())
        token_ids: list[int] = []
        tokenize = TokenizeRequest(model=body.model, chat=generate_request.chat)
        if body.truncate_prompt_tokens is not None:
            found = (await self._generation.tokenize(tokenize)).token_ids
            token_ids = body.truncate(found, generate_request.sampling.max_tokens, self.max_model_len)
            generate_request.token_ids.ids.extend(token_ids)  # replaces the chat: both are in the oneof `prompt`
        elif body.return_token_ids:
            token_ids = await self._generation.tokenize_prompt(tokenize)
        try:
            renderer = make_renderer(plan, token_ids)
            return await self._responder.respond(request, [generate_request], renderer, stream=body.stream)
        except InvalidParameter as error:  # named as in the body
            raise InvalidParameter(body.sent_names.get(error.name, error.name), error.reason) from None
        except GrammarRefused as refused:
            if functions := body.constrained_functions():
                raise await self._explain_refused_schemas(functions, refused) from None
            raise body.explain_refused_grammar(refused) from None

    async def count_tokens(self, request: Request, body: ChatRequest) -> int:
        """The number of tokens of the chat's prompt."""
        generate_request = await self._translate(request, body, self._make_plan(body))
        tokenize = TokenizeRequest(model=body.model, chat=generate_request.chat)
        return len((await self._generation.tokenize(tokenize)).token_ids)

    @property
    def max_model_len(self) -> int:
        """The model's context; 0 until a group has registered."""
        return self._generation.model.max_model_len if self._generation.model else 0

    def response_head(self, response_id: str, requested_model: str) -> ResponseHead:
        """The head of a response. `requested_model`: the model that the request names."""
        model, config = self._generation.model, self._generation.config
        fingerprints = [] if model is None else [model.fingerprint]
        if model is not None and (adapter := config.adapter_of(requested_model)):
            fingerprints += [one.fingerprint for one in model.adapters if one.name == adapter]
        shown = f"fp_{'-'.join(one[:12] for one in fingerprints)}" if fingerprints else ""
        return ResponseHead(
            response_id,
            config.response_name(requested_model),
            shown,
            shows_metrics=config.enable_per_request_metrics,
        )

    def _make_plan(self, body: ChatRequest) -> ParsingPlan:
        begins_message = body.add_generation_prompt and not body.continue_final_message
        start = ReasoningStart.UNDECIDED  # with a template of the client's own
        if not body.chat_template:
            start = self._planner.reasoning_start(self._template_arguments(body), begins_message=begins_message)
        return ParsingPlan(
            self._planner.output_format,
            start,
            body.tool_mode,
            body.named_function,
            {tool.function.name: tool.function.parameters or {} for tool in body.tools},
            max_calls=None if body.parallel_tool_calls else 1,
            separates_reasoning=body.separate_reasoning,
            shows_reasoning=body.include_reasoning,
            custom_tools=body.custom_names,
        )

    async def _translate(self, request: Request, body: ChatRequest, plan: ParsingPlan) -> GenerateRequest:
        request_id: str = request.scope["request_id"]
        prefix = self._planner.grammar_prefix(plan.reasoning_start)
        shows_tools = bool(body.chat_template) or self._planner.shows_tools
        arguments = self._template_arguments(body)

        def make() -> GenerateRequest:
            return body.to_generate_request(
                request_id, plan, prefix, self._planner.special_ids, arguments, shows_tools=shows_tools
            )

        return await (asyncio.to_thread(make) if body.has_long_grammar else in_thread_if_long(request, make))

    def _template_arguments(self, body: ChatRequest) -> dict[str, Any]:
        """The variables that the request sets of its chat template, which may be the client's own."""
        return body.template_arguments(_UNKNOWN_VARIABLES if body.chat_template else self._planner.reasoning_variables)

    async def _explain_refused_schemas(
        self, functions: list[tuple[str, Function | CustomFunction]], refused: GrammarRefused
    ) -> InvalidBody:
        """An error that names the first function whose own schema is refused, or, if there is none, the reason for the
        schemas together. `functions`: see ChatRequest.constrained_functions."""
        for path, function in functions if not refused.reason.startswith(TAKES_LONG) else ():
            custom = function.input_grammar if isinstance(function, CustomFunction) else None
            try:
                await self._generation.check_grammar(named_call_grammar(function) if custom is None else custom.alone())
            except GrammarRefused as error:
                change = "this schema, or set tool_choice to auto and remove strict"
                if custom is not None:
                    change = "this grammar, or set the format of the tool to text"
                return InvalidBody(
                    f"{path}, of {function.name!r}, cannot be enforced: {error.reason}; change {change}", path
                )
        reason = _QUOTED_LINE.split(refused.reason)[0]
        return InvalidBody(
            f"the schemas of {len(functions)} tools together cannot be enforced: {reason}; send fewer tools, or "
            "simpler schemas",
            "tools",
        )
