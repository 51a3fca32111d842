"""Generation: the public service as plain methods over its messages, whatever protocol carries them.

A request is checked, tokenised off the event loop, given a seed, placed on a group and relayed. It does not know gRPC
or HTTP: callers turn its errors into statuses, and close the iterator when their client goes away.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Final, TypeVar

from ..proto.coatcheck_pb2 import (
    Delta,
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
from ..proto.errors import InvalidRequest, Unavailable
from ..proto.tracing import NO_PARENT, Tracing
from .admission import admit, check_model_name, check_token_ids, prompt_token_ids, refuse_unknown_fields
from .config import RouterConfig
from .dispatch import Dispatch
from .eligibility import capacity
from .explanation import explanation_of
from .grammar_check import GrammarCheck
from .groups import Groups
from .limits import Limits
from .passage import Passage
from .policy import Decision
from .relay import Relay
from .request import Request
from .tenant import ANYONE, Tenant
from .tokenizer import TokenizerJson
from .traffic import Traffic

_T = TypeVar("_T")
# Hashing more tokens than this takes over a millisecond, which is too long for the event loop.
_LONG_PROMPT: Final = 16384
# Or as many as the model's context has. A token takes the tokeniser some 200 bytes while it works.
_MOST_TOKENIZED: Final = 1 << 18


class Generation:
    """Owns the tokeniser's threads, and the check of grammars."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: TokenizerJson,
        groups: Groups,
        dispatch: Dispatch,
        traffic: Traffic,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._groups = groups
        self._dispatch = dispatch
        self._traffic = traffic
        self._tracing = tracing
        self._limits = Limits()
        self._grammars = GrammarCheck()
        self._rng = random.SystemRandom()
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self._config.model_name

    @property
    def model(self) -> GetModelResponse | None:
        """What is served; None until a group has registered."""
        return self._groups.model

    async def generate_stream(
        self,
        message: GenerateRequest,
        on_decision: Callable[[Decision], None] | None = None,
        tenant: Tenant = ANYONE,
        carrier: Mapping[str, str] = NO_PARENT,
        deadline: float | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Started, deltas, Final. Closing it early frees what the request holds. At its end `on_decision` is told why
        it was where it was last. `carrier` is the client's trace context, `deadline` when it gives up, by the event
        loop's clock: what cannot begin by then is refused."""
        passage = Passage(self._traffic, self._tracing, message.request_id, carrier)
        relay: Relay | None = None
        failure: BaseException | None = None
        try:
            with self._traffic.request(tenant):
                self._shed(message, tenant, deadline)
                request = await self._admit(message, tenant, passage, deadline)
                self._limits.tokens(tenant, len(request.prompt_token_ids))
                skip = request.sampling.skip_special_tokens
                relay = Relay(request, self._dispatch, self._config, lambda: self._tokenizer.detokenizer(skip))
                try:
                    async for event in relay.events():
                        if event.HasField("delta"):
                            passage.delta(event.delta.choice)
                        yield event
                finally:
                    relay.close()
                    self._limits.tokens(tenant, relay.completion_tokens)
                    if on_decision is not None and relay.decision is not None:
                        on_decision(relay.decision)
        except BaseException as error:
            failure = error
            raise
        finally:
            passage.ended(relay.usage if relay is not None else None, failure)

    async def generate(
        self,
        message: GenerateRequest,
        on_decision: Callable[[Decision], None] | None = None,
        tenant: Tenant = ANYONE,
        carrier: Mapping[str, str] = NO_PARENT,
        deadline: float | None = None,
    ) -> GenerateResponse:
        """The same answer once it is whole."""
        response = GenerateResponse()
        choices: dict[int, Delta] = {}
        texts: dict[int, list[str]] = {}
        async with aclosing(self.generate_stream(message, on_decision, tenant, carrier, deadline)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "started":
                        response.started.CopyFrom(event.started)
                    case "prompt_logprobs":
                        response.prompt_logprobs.MergeFrom(event.prompt_logprobs)  # one part of them
                    case "delta":
                        delta = event.delta
                        texts.setdefault(delta.choice, []).append(delta.text)
                        delta.ClearField("text")  # strings would be replaced, not joined
                        choices.setdefault(delta.choice, Delta()).MergeFrom(delta)
                    case "final":
                        response.final.CopyFrom(event.final)
        for index in sorted(choices):
            choices[index].text = "".join(texts[index])
            response.choices.append(choices[index])
        return response

    async def explain(self, message: GenerateRequest, tenant: Tenant = ANYONE) -> Explanation:
        """Where the request would go now, and what each group would cost it; it is not sent."""
        return explanation_of(self._dispatch.explain(await self._admit(message, tenant)))

    async def tokenize(self, message: TokenizeRequest) -> TokenizeResponse:
        """A text's or a chat's token ids."""
        refuse_unknown_fields(message)
        check_model_name(message.model, self._config.model_name)
        if message.HasField("chat") and message.HasField("add_special_tokens"):
            raise InvalidRequest("add_special_tokens is for text: a chat template brings its own; leave it out")
        most = max(_MOST_TOKENIZED, self._groups.model.max_model_len if self._groups.model else 0)
        ids = await self._aside(lambda: prompt_token_ids(message, self._tokenizer, most))
        return TokenizeResponse(token_ids=ids)

    async def detokenize(self, message: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        refuse_unknown_fields(message)
        check_model_name(message.model, self._config.model_name)
        check_token_ids(message.token_ids, self._vocab_size())
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        return DetokenizeResponse(text=await self._aside(lambda: self._tokenizer.decode(message.token_ids, skip)))

    async def get_model(self, message: GetModelRequest) -> GetModelResponse:
        """What is served; raises Unavailable until a group has registered."""
        refuse_unknown_fields(message)
        return self._model()

    def close(self) -> None:
        """Ends its threads."""
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _shed(self, message: GenerateRequest, tenant: Tenant, deadline: float | None) -> None:
        """Whoever is refused for the load is refused at once, before its prompt is tokenised: raises Overloaded and
        DeadlineExceeded."""
        if not message.resume:  # else it was taken before
            self._limits.request(tenant)
            now = asyncio.get_running_loop().time()
            self._dispatch.line.require_room(tenant, tenant.ranked(message.priority), now, deadline)

    async def _admit(
        self,
        message: GenerateRequest,
        tenant: Tenant,
        passage: Passage | None = None,
        deadline: float | None = None,
    ) -> Request:
        refuse_unknown_fields(message)
        check_model_name(message.model, self._config.model_name)
        most = self._capacity(self._model())
        if message.WhichOneof("prompt") == "token_ids":  # no text, so nothing to wait for
            token_ids = prompt_token_ids(message, self._tokenizer)
        else:
            token_ids = await self._aside(lambda: prompt_token_ids(message, self._tokenizer, most))
        model = self._model()
        request = admit(
            message,
            token_ids,
            vocab_size=model.vocab_size,
            capacity=self._capacity(model),
            rng=self._rng,
            tenant=tenant,
        )
        if request.sampling.structured is not None:
            await self._grammars.require(request.sampling.structured)
        if len(token_ids) > _LONG_PROMPT:
            await self._aside(lambda: request.chain(model))
        if passage is None:
            return request
        passage.admitted(request.request_id, len(token_ids), resumed=bool(request.resume))
        return dataclasses.replace(request, passage=passage, deadline=deadline)

    def _capacity(self, model: GetModelResponse) -> int:
        rooms = [capacity(registration) for _, registration in self._groups.serving()]
        return max(rooms, default=model.max_model_len)

    def _model(self) -> GetModelResponse:
        if self._groups.model is None:
            raise Unavailable("no worker group has started yet; try again shortly")
        return self._groups.model

    def _vocab_size(self) -> int:
        model = self._groups.model
        return model.vocab_size if model is not None else self._tokenizer.vocab_size

    async def _aside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
