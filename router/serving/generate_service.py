"""GenerateService: the methods of the public service over protobuf messages. gRPC and HTTP both call them.

A request is tokenised off the event loop (a long prompt in a side process), validated, given a seed, sent to a group
and relayed. Callers turn errors into statuses, and close the iterator when their client disconnects.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from google.protobuf.message import Message

from coatcheck.proto.errors import ContextLengthExceeded, InvalidParameter, InvalidRequest, NeverFits, Unavailable
from coatcheck.proto.generation_config import NO_DEFAULTS, SamplingDefaults
from coatcheck.proto.grammar import Grammar, GrammarRefused
from coatcheck.proto.stubs.coatcheck_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    Explanation,
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    GetModelResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage
from coatcheck.proto.tracing import Tracing
from coatcheck.router.access.rate_limits import TenantLimits
from coatcheck.router.access.resume_tickets import ResumeTickets
from coatcheck.router.access.tenant import ANONYMOUS, Tenant
from coatcheck.router.config import RouterConfig
from coatcheck.router.event_loop.grammar_validator import GrammarValidator
from coatcheck.router.event_loop.message_limits import LONG_BYTES, check_chat, check_entries, has_long_prompt
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.request import Request
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.routing.routing_cost import Decision
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.serving.logprob_limits import WideAnswers
from coatcheck.router.serving.merged_response import MergedResponse
from coatcheck.router.serving.output_splitter import OutputSplitter
from coatcheck.router.serving.relay import Relay
from coatcheck.router.serving.request_validation import (
    check_and_digest,
    check_model_name,
    check_token_ids,
    encode_constraints,
    encode_long_prompt,
    prompt_token_ids,
    validate_request,
)
from coatcheck.router.serving.tool_choice import calls_grammar, check_tool_choice, hide_tools, may_constrain_calls
from coatcheck.router.telemetry.request_lifecycle import RequestLifecycle
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from coatcheck.router.telemetry.traffic import Traffic
from coatcheck.router.text.detokenizer import Detokenizer
from coatcheck.router.text.tokenizer import TokenizerJson

_T = TypeVar("_T")
_Message = TypeVar("_Message", bound=Message)
# Hashing or serialising more tokens than this takes over a millisecond, which is too long for the event loop.
_LONG_PROMPT: Final = 16384
# Max tokens of a call to `tokenize`, unless the model's context is longer. The tokenizer needs 200 bytes per token.
_MAX_TOKENIZED: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call to generate brings besides its message.

    `trace_context`: the client's headers of W3C trace context. `deadline`: when the client gives up, in the event
    loop's time; a request that cannot begin by then is refused. `on_admitted` is called once the request is valid,
    before it waits for a group. `on_decision` is called at the end with the last routing decision.
    """

    tenant: Tenant = ANONYMOUS
    trace_context: Mapping[str, str] = field(default_factory=dict)
    deadline: float | None = None
    on_admitted: Callable[[], None] = lambda: None
    on_decision: Callable[[Decision], None] = lambda decision: None


_NO_OPTIONS: Final = CallOptions()


class GenerateService:
    """One for each router. Owns the tokenizer's threads and the grammar validator."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: TokenizerJson,
        planner: OutputPlanner,
        groups: GroupRegistry,
        dispatcher: Dispatcher,
        traffic: Traffic,
        metrics: RequestMetrics,
        side: SideProcesses,
        tracing: Tracing | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._planner = planner
        self._groups = groups
        self._dispatcher = dispatcher
        self._traffic = traffic
        self._metrics = metrics
        self._side = side
        self._tracing = tracing
        self._limits = TenantLimits()
        self._tickets = ResumeTickets(config.resume_key)
        self._wide_answers = WideAnswers()
        self._grammars = GrammarValidator()
        self._rng = random.SystemRandom()
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self._config.model_name

    @property
    def config(self) -> RouterConfig:
        """The settings of this router."""
        return self._config

    @property
    def max_tokenized(self) -> int:
        """Max tokens of a call to `tokenize` or `detokenize`: the model's context length, but at least 262,144."""
        return max(_MAX_TOKENIZED, self._groups.model.max_model_len if self._groups.model else 0)

    @property
    def model(self) -> GetModelResponse | None:
        """The model that is served; None until a group has registered."""
        return self._groups.model

    @property
    def max_sequence_tokens(self) -> int:
        """Max tokens of one sequence on any group; 0 until a group has registered."""
        return self._max_sequence_tokens(self._groups.model) if self._groups.model is not None else 0

    @property
    def defaults(self) -> SamplingDefaults:
        """Values of sampling fields that a request leaves unset, from the model's generation_config.json."""
        return self._defaults

    async def generate_stream(
        self, message: GenerateRequest, options: CallOptions = _NO_OPTIONS
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields Started, then prompt log-probabilities and deltas, then Final. Closing the iterator early aborts the
        request."""
        tenant = options.tenant
        lifecycle = RequestLifecycle(self._metrics, self._tracing, message.request_id, options.trace_context)
        relay: Relay | None = None
        failure: BaseException | None = None
        try:
            with self._traffic.count_request(tenant):
                is_admitted = await self._check_admission(message, options)
                request = await self._validate(message, tenant, options.deadline)
                prompt_tokens = len(request.prompt_token_ids)
                lifecycle.record_admitted(request.request_id, prompt_tokens, is_resumed=bool(request.resume))
                self._limits.charge_tokens(tenant, prompt_tokens)
                options.on_admitted()
                make_detokenizer, splitter = self._make_text_stages(message, request)
                relay = self._make_relay(message, request, lifecycle, make_detokenizer, is_admitted=is_admitted)
                try:
                    with self._wide_answers.reserve(request, self._vocab_size()):
                        async for event in relay.events():
                            if event.HasField("delta"):
                                lifecycle.record_delta(event.delta.choice)
                                if splitter is not None:
                                    splitter.split(event.delta)
                            yield event
                finally:
                    relay.close()
                    self._limits.charge_tokens(tenant, relay.usage.completion_tokens)
                    if relay.decision is not None:
                        options.on_decision(relay.decision)
        except BaseException as error:
            failure = error
            raise
        finally:
            lifecycle.record_end(relay.usage if relay is not None else None, failure)

    async def generate(self, message: GenerateRequest, options: CallOptions = _NO_OPTIONS) -> GenerateResponse:
        """Runs `generate_stream` and merges its events into one response."""
        response = MergedResponse()
        async with aclosing(self.generate_stream(message, options)) as events:
            async for event in events:
                response.add_event(event)
        return response.finish()

    async def check_grammar(self, grammar: Grammar) -> None:
        """Raises GrammarRefused if the grammar does not compile."""
        await self._grammars.validate(grammar)

    async def explain(self, message: GenerateRequest, tenant: Tenant = ANONYMOUS) -> Explanation:
        """See Dispatcher.explain."""
        return self._dispatcher.explain(await self._validate(message, tenant)).to_message()

    async def tokenize(self, message: TokenizeRequest) -> TokenizeResponse:
        """The token ids of a text or a chat."""
        await self._off_loop(check_entries, message)
        check_model_name(message.model, self._config.model_names)
        if message.HasField("chat") and message.HasField("add_special_tokens"):
            raise InvalidRequest("add_special_tokens needs a text: a chat template writes its own; remove it")
        if message.chat.tool_choice:
            hide_tools(message.chat)
        ids = await self._prompt_ids(message, self.max_tokenized)
        return TokenizeResponse(token_ids=ids)

    async def tokenize_prompt(self, message: TokenizeRequest) -> list[int]:
        """The token ids of a prompt to generate from. Raises ContextLengthExceeded if it is far over the context."""
        check_model_name(message.model, self._config.model_names)
        return list(await self._ids_within_context(message, self._max_sequence_tokens(self._model())))

    async def detokenize(self, message: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids; raises NeverFits for more than `max_tokenized`."""
        await self._off_loop(check_entries, message)
        check_model_name(message.model, self._config.model_names)
        if len(message.token_ids) > self.max_tokenized:
            raise NeverFits(f"there are {len(message.token_ids)} token ids; the maximum is {self.max_tokenized}")
        check_token_ids(message.token_ids, self._vocab_size())
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        return DetokenizeResponse(text=await self._in_thread(lambda: self._tokenizer.decode(message.token_ids, skip)))

    async def get_model(self, message: GetModelRequest) -> GetModelResponse:
        """The model that is served. Raises Unavailable until a group has registered."""
        check_entries(message)
        model = GetModelResponse()
        model.CopyFrom(self._model())
        if given := self._defaults.given_values():
            model.default_sampling.CopyFrom(SamplingMessage(**given))
        return model

    def close(self) -> None:
        """Ends the threads and the grammar validator."""
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _check_admission(self, message: GenerateRequest, options: CallOptions) -> bool:
        """Whether the message has the ticket of a request that a router has admitted before. Charges any other request
        to its tenant, and refuses it before its prompt is tokenised if the queue has no room."""
        tenant = options.tenant
        admitted = self._tickets.redeem(message, tenant)
        if admitted and admitted == await self._off_loop(check_and_digest, message):
            return True
        self._limits.charge_request(tenant)
        self._dispatcher.require_room(tenant, tenant.effective_priority(message.priority), options.deadline)
        return False

    def _make_relay(
        self,
        message: GenerateRequest,
        request: Request,
        lifecycle: RequestLifecycle,
        make_detokenizer: Callable[[], Detokenizer],
        *,
        is_admitted: bool,
    ) -> Relay:
        issued = self._tickets.issue(request.digest, request.tenant, request.request_id, request.sampling.seed)
        ticket = message.resume_ticket if is_admitted else issued
        return Relay(
            request,
            lifecycle,
            self._dispatcher,
            self._config,
            make_detokenizer,
            is_admitted=is_admitted,
            resumed_kind=self._tickets.read_kind(message.resume_ticket) if message.resume else b"",
            make_ticket=lambda kind: self._tickets.add_kind(ticket, kind),
        )

    async def _validate(self, message: GenerateRequest, tenant: Tenant, deadline: float | None = None) -> Request:
        digest = await self._off_loop(check_and_digest, message)  # first, because the message is changed below
        check_model_name(message.model, self._config.model_names)
        if message.chat.tool_choice:
            hide_tools(message.chat)
            check_tool_choice(message)
        token_ids = await self._ids_within_context(message, self._max_sequence_tokens(self._model()))
        model = self._model()
        if may_constrain_calls(message.chat) and not message.sampling.HasField("structured"):
            await self._constrain_calls(message)
        request = validate_request(
            message,
            token_ids,
            vocab_size=model.vocab_size,
            capacity=self._max_sequence_tokens(model),
            rng=self._rng,
            tenant=tenant,
            defaults=self._defaults,
            deadline=deadline,
            max_logprobs=self._config.max_logprobs,
            adapter=self._config.adapter_of(message.model),
            digest=digest,
        )
        if request.sampling.bad_words or request.sampling.max_reasoning_tokens is not None:
            sampling = await self._in_thread(
                lambda: encode_constraints(request.sampling, message, self._tokenizer, self._planner)
            )
            request = replace(request, sampling=sampling)
        if request.sampling.structured is not None:
            await self._grammars.validate(request.sampling.structured)
        if len(token_ids) > _LONG_PROMPT:
            await self._in_thread(lambda: request.prepare_long_prompt(model))
        return request

    async def _constrain_calls(self, message: GenerateRequest) -> None:
        """Sets the grammar of the message to that of its tool calls, if they are required or strict. Raises
        InvalidRequest."""
        calls = await self._in_thread(lambda: calls_grammar(message.chat, self._planner))
        if calls is None:
            return
        try:
            await self._grammars.validate(calls)
        except GrammarRefused as error:
            raise InvalidParameter("tools", f"have schemas that cannot be enforced: {error.reason}") from None
        message.sampling.structured.CopyFrom(calls.to_message())

    def _make_text_stages(
        self, message: GenerateRequest, request: Request
    ) -> tuple[Callable[[], Detokenizer], OutputSplitter | None]:
        """The function that makes a choice's detokenizer, and the splitter of its text (None without split_output). If
        the splitter finds its markers by special tokens, the detokenizer does not skip them."""
        splits = message.chat.split_output
        shows_markers = splits and self._planner.output_format.shows_special_tokens
        skip = request.sampling.skip_special_tokens and not shows_markers

        def make_detokenizer() -> Detokenizer:
            return self._tokenizer.detokenizer(skip)

        if not splits:
            return make_detokenizer, None
        return make_detokenizer, OutputSplitter(message.chat, self._planner, request.resume, make_detokenizer)

    async def _off_loop(self, read: Callable[[_Message], _T], message: _Message) -> _T:
        """`read(message)`; in a thread if the message is long."""
        if message.ByteSize() > LONG_BYTES:
            return await self._in_thread(lambda: read(message))
        return read(message)

    async def _ids_within_context(self, message: GenerateRequest | TokenizeRequest, capacity: int) -> Sequence[int]:
        """As _prompt_ids, but raises ContextLengthExceeded instead of NeverFits. `capacity`: max tokens of one
        sequence. A prompt a little over `capacity` passes here, and `validate_request` refuses it."""
        try:
            return await self._prompt_ids(message, capacity)
        except NeverFits as error:
            raise ContextLengthExceeded.for_limit(capacity, str(error)) from None

    async def _prompt_ids(self, message: GenerateRequest | TokenizeRequest, at_most: int) -> Sequence[int]:
        """The prompt's token ids, computed off the event loop unless the client has sent a few ids. Raises NeverFits
        for a prompt far over `at_most` tokens."""
        check_chat(message, at_most)
        if message.chat.chat_template and not self._config.trust_request_chat_template:
            raise InvalidParameter(
                "chat_template", "is not accepted by this server (--trust-request-chat-template); remove it"
            )
        if isinstance(message, GenerateRequest) and 0 < len(message.token_ids.ids) <= _LONG_PROMPT:
            return prompt_token_ids(message, self._tokenizer)  # a short copy
        directory = self._tokenizer.directory
        if directory is not None and has_long_prompt(message):
            return await self._side.run(
                encode_long_prompt, directory, type(message), message.SerializeToString(), at_most
            )
        return await self._in_thread(lambda: prompt_token_ids(message, self._tokenizer, at_most))

    def _max_sequence_tokens(self, model: GetModelResponse) -> int:
        """Max tokens of one sequence on any group."""
        return self._dispatcher.serving.max_sequence_tokens or model.max_model_len

    def _model(self) -> GetModelResponse:
        if self._groups.model is None:
            raise Unavailable("no worker group has started yet; try again shortly")
        return self._groups.model

    def _vocab_size(self) -> int:
        return self._groups.model.vocab_size if self._groups.model is not None else self._tokenizer.vocab_size

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
