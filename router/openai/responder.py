"""Responder: runs the generate requests of an HTTP request, and sends the response, whole or as a stream."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import Request
from starlette.responses import Response

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest
from coatcheck.proto.tracing import TRACE_CONTEXT_HEADERS
from coatcheck.router.openai.merge_streams import start_merged
from coatcheck.router.openai.response_sender import LargeResponses, ResponseRenderer, SseResponse, while_connected
from coatcheck.router.serving.generate_service import CallOptions, GenerateService
from coatcheck.router.serving.logprob_limits import num_values

_T = TypeVar("_T")
_MAX_LOGPROBS: Final = 1 << 22  # of one response; 2.7 million are 76 MB of JSON


class Responder:
    """One for each router. `large` encodes large responses."""

    def __init__(self, generation: GenerateService, large: LargeResponses) -> None:
        self._generation = generation
        self._large = large

    async def respond(
        self,
        request: Request,
        generate_requests: Sequence[GenerateRequest],
        renderer: ResponseRenderer,
        *,
        stream: bool,
    ) -> Response:
        """Runs all generate requests, one for each prompt, and responds: with an SSE stream if `stream`, else with one
        JSON object. Cancels the requests if the client disconnects."""
        trace_context = {name: request.headers[name] for name in TRACE_CONTEXT_HEADERS if name in request.headers}
        options = CallOptions(request.scope["tenant"], trace_context)
        self._check_logprobs(generate_requests, stream=stream)
        if not stream:
            calls = [
                partial(self._generation.generate, generate_request, options) for generate_request in generate_requests
            ]
            responses = await while_connected(request.receive, run_all(calls))
            return await self._large.make_response(renderer, responses)
        admitted = asyncio.Semaphore(0)
        options = replace(options, on_admitted=admitted.release)
        sources = [
            self._generation.generate_stream(generate_request, options) for generate_request in generate_requests
        ]
        events = await while_connected(request.receive, start_merged(sources, admitted))
        return SseResponse(events, renderer, self._large)

    def _check_logprobs(self, generate_requests: Sequence[GenerateRequest], *, stream: bool) -> None:
        """Raises InvalidRequest if the response could have more log-probabilities than the router may hold in memory.
        In a stream only those of prompts are held."""
        model = self._generation.model
        max_model_len, vocab = (model.max_model_len, model.vocab_size) if model else (0, 0)
        count = 0
        for generate_request in generate_requests:
            sampling = generate_request.sampling
            n = sampling.n or 1
            if sampling.HasField("prompt_logprobs"):
                count += n * len(generate_request.token_ids.ids) * num_values(sampling.prompt_logprobs, vocab)
            if not sampling.HasField("logprobs"):
                continue
            each = num_values(sampling.logprobs, vocab)
            if sampling.logprob_token_ids:
                each = 1 + len(sampling.logprob_token_ids)
            if not stream:
                count += n * min(sampling.max_tokens or max_model_len, max_model_len) * each
        if count > _MAX_LOGPROBS:
            raise InvalidRequest(
                f"the response could have {count:,} log-probabilities, more than {_MAX_LOGPROBS:,}; ask for "
                "less with logprobs, n or max_tokens, or send fewer prompts in a request"
            )


async def run_all(calls: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
    """The results of all calls, which run together; the first error cancels the others."""
    tasks: list[asyncio.Task[_T]] = []
    try:
        for call in calls:
            tasks.append(asyncio.create_task(call()))
            await asyncio.sleep(0)  # starting a thousand prompts at once would block the event loop
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
