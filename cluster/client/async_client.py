"""AsyncClient: generates over gRPC, for code with coroutines. A stream that loses its router continues at another one.

    async with AsyncClient("127.0.0.1:50051") as client:
        result = await client.generate("The capital of France is", max_tokens=8)
        async for chunk in client.stream("Once upon a time", temperature=0.7):
            print(chunk.text, end="")

To resume, the client sends the first request again, with the seed and the token ids that it has received. Nothing is
needed from the lost router.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, Unpack

import grpc

from coatcheck.cluster.client.connection_errors import explain_error
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.cluster.client.request_builder import (
    Conversation,
    Prompt,
    RequestOptions,
    build_chat,
    build_embed_requests,
    build_request,
    check_timeout,
    is_one_prompt,
)
from coatcheck.cluster.client.results import GenerationChunk, GenerationResult
from coatcheck.cluster.client.resume_state import ResumeState
from coatcheck.cluster.config.address import DEFAULT_ADDRESS, split_address
from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import CoatcheckError, InvalidConfig, InvalidRequest, Unavailable
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub

_ADDRESSES_FORM = f"HOST:PORT such as {DEFAULT_ADDRESS!r}, or a list of at least one"
API_KEY_VARIABLE = "COATCHECK_API_KEY"
CLOSED_DURING_CALL = "the client was closed during the call"
_MAX_EMBED_CALLS = 64  # at a time: a router refuses calls beyond its max_queued, by default 1024

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Reconnect to a restarted router at once, not after gRPC's default backoff of up to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection of its own: a router serves MAX_STREAMS calls of one connection at once.
    ("grpc.use_local_subchannel_pool", 1),
]


class AsyncGenerationStream:
    """An asynchronous iterator over the chunks of one request. `result` holds what has come so far."""

    def __init__(self, events: AsyncGenerator[pb.GenerateEvent, None]) -> None:
        self.result = GenerationResult(time.perf_counter())
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        async for event in self._events:
            if (chunk := self.result.add(event, time.perf_counter())) is not None:
                return chunk
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request if it still runs. The group frees its blocks."""
        await self._events.aclose()

    async def read_all(self) -> GenerationResult:
        """Wait for the end of the stream and return the whole result."""
        async for _ in self:
            pass
        return self.result


class AsyncClient:
    """A client of one or several routers of one cluster; an async context manager that owns its channels.

    `addresses`: HOST:PORT of each router; the client moves to the next one when it loses a router. `api_key` defaults
    to the environment variable COATCHECK_API_KEY. `tls_ca` turns TLS on: a PEM file, or "system" for the host's own
    authorities. `tls_cert` and `tls_key`: the client's own certificate, where routers ask for one.

    `max_resumes`: how often one stream may move to another router without a new event in between. `resume_timeout`:
    seconds for which a stream looks for a router.

    Raises InvalidConfig for addresses or credentials that cannot be used.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        credentials: Credentials | None = None,
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        max_resumes: int = 128,
        resume_timeout: float = 120.0,
    ) -> None:
        self._addresses = _check_addresses(addresses)
        _check_argument("credentials", credentials, Credentials, "a Credentials")
        _check_argument("api_key", api_key, str, "a text")
        for name, file in (("tls_ca", tls_ca), ("tls_cert", tls_cert), ("tls_key", tls_key)):
            _check_argument(name, file, str | os.PathLike, "the path of a PEM file")
        if not isinstance(max_resumes, int) or max_resumes < 0:
            raise InvalidConfig(f"max_resumes is {max_resumes!r}; it must be a whole number from 0")
        if not isinstance(resume_timeout, int | float) or not resume_timeout >= 0:
            raise InvalidConfig(f"resume_timeout is {resume_timeout!r}; it must be a number of seconds from 0")
        if credentials is None:
            credentials = Credentials.build(tls_ca, tls_cert, tls_key, api_key or os.environ.get(API_KEY_VARIABLE))
        self._credentials = credentials
        self._max_resumes = max_resumes
        self._resume_timeout = resume_timeout
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0  # how often streams have moved on, and so which address the next call goes to
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every channel. Calls that run raise RuntimeError, and so does every later call."""
        self._is_closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationResult:
        """Generate from a text or from token ids. Return the whole answer.

        `sampling` fixes every sampling field. `options` sets single fields; other fields have the model's
        default.

        Raises InvalidRequest, Overloaded, Unavailable or another CoatcheckError with the server's message.
        """
        return await self.stream(prompt, sampling, **options).read_all()

    async def chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationResult:
        """Answer a conversation by the model's chat template: `[{"role": "user", "content": "Hello"}]`."""
        return await self.stream_chat(messages, sampling, **options).read_all()

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerationStream:
        """The answer to a prompt, chunk by chunk, as the server makes it."""
        check_timeout(timeout := options.pop("timeout", None))
        request = build_request(prompt, sampling=sampling, options=options)
        return AsyncGenerationStream(self.stream_events(request, timeout=timeout))

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerationStream:
        """The answer to a conversation, chunk by chunk."""
        check_timeout(timeout := options.pop("timeout", None))
        request = build_request(messages=messages, sampling=sampling, options=options)
        return AsyncGenerationStream(self.stream_events(request, timeout=timeout))

    async def explain(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> pb.Explanation:
        """Which group would answer the prompt now, and each group's cost in seconds. Nothing is generated."""
        timeout = options.pop("timeout", None)
        request = build_request(prompt, options=options)
        explanation: pb.Explanation = await self._call(AdminStub, "Explain", request, timeout)
        return explanation

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[list[float]]:
        """The embedding of each prompt; a text, or one list of token ids, is one prompt.

        `pooling`: "last" or "mean"; None: as the checkpoint says. `dimensions`: only the first values. `timeout`:
        seconds for each prompt; at most 64 prompts are sent at a time.
        Raises InvalidRequest, Overloaded, Unavailable or another CoatcheckError with the server's message.
        """
        requests = build_embed_requests(prompts, pooling, dimensions, normalize, cache_salt)
        room = asyncio.Semaphore(_MAX_EMBED_CALLS)

        async def embed_one(request: pb.EmbedRequest) -> pb.EmbedResponse:
            async with room:
                response: pb.EmbedResponse = await self._call(GenerationStub, "Embed", request, timeout)
                return response

        calls = [asyncio.ensure_future(embed_one(request)) for request in requests]
        try:
            embedded = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return [list(one.embedding) for one in embedded]

    async def score(
        self,
        text: Prompt,
        others: Sequence[Prompt],
        *,
        pooling: str | None = None,
        timeout: float | None = None,
    ) -> list[float]:
        """The cosine similarity of the embedding of `text` with that of each of `others`."""
        if is_one_prompt(others):
            raise InvalidRequest(f"others is one prompt; give a list of prompts: [{others!r}]")
        first, *rest = await self.embed([text, *others], pooling=pooling, timeout=timeout)
        return [sum(a * b for a, b in zip(first, other, strict=True)) for other in rest]

    async def tokenize(self, prompt: str | Conversation, *, timeout: float | None = None) -> list[int]:
        """The token ids of a text, or of a conversation by the model's chat template."""
        request = pb.TokenizeRequest()
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(build_chat(prompt))
        answer: pb.TokenizeResponse = await self._call(GenerationStub, "Tokenize", request, timeout)
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids."""
        try:
            if isinstance(token_ids, bytes | bytearray | Mapping | None):
                raise TypeError
            request = pb.DetokenizeRequest(token_ids=token_ids)
        except (TypeError, ValueError):
            raise InvalidRequest("token_ids must be one list of token ids: whole numbers from 0") from None
        answer: pb.DetokenizeResponse = await self._call(GenerationStub, "Detokenize", request, timeout)
        return answer.text

    async def get_model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        """The served model: name, context length, block size, types and sampling defaults."""
        model: pb.GetModelResponse = await self._call(GenerationStub, "GetModel", pb.GetModelRequest(), timeout)
        return model

    async def stream_events(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        """One Started, Deltas without gap or repeat, and one Final. They may come from several routers, one after
        another.

        Raises the CoatcheckError of the status of a refusal, and Unavailable if no router can continue the stream.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        delivered = ResumeState(request)
        losses = 0
        lost_since = 0.0
        current = self._current  # this stream's own: if several lose a router at once, each tries the next one
        while True:
            address = self._address_at(current)
            try:
                async with aclosing(self._stream_from_router(address, delivered.request(), deadline)) as events:
                    async for event in events:
                        if (new := delivered.record_event(event)) is not None:
                            losses = 0
                            yield new
                if delivered.complete:
                    return
                loss: CoatcheckError = Unavailable(f"{address} closed the stream before the answer was complete")
            except grpc.aio.AioRpcError as error:
                if _refuses_unknown_field(error) and delivered.forget_ticket():
                    continue  # the router is of an older version, which admits the resume as a new request
                loss = explain_error(error, address, timeout)
                if not _may_resume(error.code(), delivered.started):
                    raise loss from None
            losses += 1
            if losses == 1:
                lost_since = time.monotonic()
            # Before the first event each router is tried once. A started stream is retried for longer.
            budget = self._max_resumes if delivered.started else len(self._addresses) - 1
            if losses > budget or time.monotonic() - lost_since > self._resume_timeout:
                if delivered.started:
                    raise Unavailable(f"lost the router after {counted(delivered.num_tokens, 'token')}: {loss}")
                raise loss
            current += 1
            self._current = max(self._current, current)
            if losses >= len(self._addresses):
                await asyncio.sleep(min(0.05 * 2 ** min(losses, 5), self._resume_timeout))

    @property
    def address(self) -> str:
        """The router that the next call goes to."""
        return self._address_at(self._current)

    def _address_at(self, current: int) -> str:
        return self._addresses[current % len(self._addresses)]

    def _channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`, opened when it is first needed. Raises RuntimeError if the client is closed."""
        if self._is_closed:
            raise RuntimeError("the client is closed")
        if address not in self._channels:
            self._channels[address] = self._credentials.channel(address, OPTIONS)
        return self._channels[address]

    def _check_not_closed(self) -> None:
        """After a cancellation: raise RuntimeError if `close` has caused it, by closing the call's channel."""
        task = asyncio.current_task()
        if self._is_closed and task is not None and not task.cancelling():
            raise RuntimeError(CLOSED_DURING_CALL) from None

    async def _call(self, stub_class: Any, method: str, request: object, timeout: float | None) -> Any:
        """One unary call to `address`. Raises InvalidRequest for `timeout`, and the CoatcheckError of its status."""
        check_timeout(timeout)
        address = self.address  # streams may move on during the call
        call = getattr(stub_class(self._channel(address)), method)
        try:
            return await call(request, timeout=timeout, metadata=self._credentials.metadata)
        except grpc.aio.AioRpcError as error:
            raise explain_error(error, address, timeout) from None
        except asyncio.CancelledError:
            self._check_not_closed()
            raise

    async def _stream_from_router(
        self, address: str, request: pb.GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        stub: Any = GenerationStub(self._channel(address))  # type: ignore[no-untyped-call]  # made by protoc
        call = stub.GenerateStream(request, timeout=timeout, metadata=self._credentials.metadata)
        try:
            async for event in call:
                yield event
        except asyncio.CancelledError:
            self._check_not_closed()
            raise
        finally:
            # A caller that stops iterating must not leave the request running.
            call.cancel()


def _check_addresses(addresses: object) -> tuple[str, ...]:
    """One address or several, as a tuple. Raises InvalidConfig unless each is HOST:PORT."""
    several = (addresses,) if isinstance(addresses, str) else addresses
    if not isinstance(several, Iterable) or isinstance(several, bytes | Mapping):
        raise InvalidConfig(f"addresses is {addresses!r}; it must be {_ADDRESSES_FORM}")
    checked = tuple(several)
    if not checked or not all(isinstance(address, str) for address in checked):
        raise InvalidConfig(f"addresses is {addresses!r}; it must be {_ADDRESSES_FORM}")
    for address in checked:
        split_address(address)
    return checked


def _check_argument(name: str, value: object, kind: Any, form: str) -> None:
    """Raise InvalidConfig unless `value` is None or of type `kind`. `form`: what the value must be, in words."""
    if value is not None and not isinstance(value, kind):
        shown = type(value).__name__  # not the value, which may be a secret
        raise InvalidConfig(f"{name} is of type {shown}; it must be {form}, or None")


def _may_resume(code: grpc.StatusCode, started: bool) -> bool:
    """Whether to try another router after status `code`. A started stream also waits for a router that is full."""
    return code is grpc.StatusCode.UNAVAILABLE or (started and code is grpc.StatusCode.RESOURCE_EXHAUSTED)


def _refuses_unknown_field(error: grpc.aio.AioRpcError) -> bool:
    """Whether the router refuses the request for a field that its version does not know."""
    return error.code() is grpc.StatusCode.INVALID_ARGUMENT and "unknown field" in (error.details() or "")
