"""Client: AsyncClient for code without coroutines.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        for chunk in client.stream("Once upon a time", temperature=0.7):
            print(chunk.text, end="")

Every call runs on an event loop in the client's own thread, so several threads may share one client.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypedDict, TypeVar, Unpack

from coatcheck.cluster.client.async_client import CLOSED_DURING_CALL, AsyncClient, AsyncGenerationStream
from coatcheck.cluster.client.credentials import Credentials
from coatcheck.cluster.client.request_builder import Conversation, Prompt, RequestOptions
from coatcheck.cluster.client.results import GenerationChunk, GenerationResult
from coatcheck.cluster.config.address import DEFAULT_ADDRESS
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as pb

T = TypeVar("T")


class GenerationStream:
    """An iterator over the chunks of one request. `result` holds what has come so far."""

    def __init__(self, stream: AsyncGenerationStream, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.result = stream.result
        self._stream = stream
        self._run = run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        chunk: GenerationChunk | None = self._run(self._next_chunk())
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. The group frees its blocks."""
        self._run(self._stream.aclose())

    async def _next_chunk(self) -> GenerationChunk | None:
        return await anext(self._stream, None)


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of Client. Their meaning is that of AsyncClient's."""

    api_key: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    max_resumes: int
    resume_timeout: float


class Client:
    """A blocking client of one or several routers of one cluster. The arguments and methods are AsyncClient's."""

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        credentials: Credentials | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._client = AsyncClient(addresses, credentials, **options)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # no call is begun once `close` has
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="coatcheck-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every channel and end the client's thread. Calls that run in other threads raise RuntimeError, and so
        does every later call."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            closed = asyncio.run_coroutine_threadsafe(self._end_calls(), self._loop)
        closed.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationResult:
        """Generate from a text or from token ids. Return the whole answer. See AsyncClient.generate."""
        return self._run(self._client.generate(prompt, sampling, **options))

    def chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationResult:
        """Answer a conversation by the model's chat template: `[{"role": "user", "content": "Hello"}]`."""
        return self._run(self._client.chat(messages, sampling, **options))

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationStream:
        """The answer to a prompt, chunk by chunk, as the server makes it."""
        return GenerationStream(self._client.stream(prompt, sampling, **options), self._run)

    def stream_chat(
        self, messages: Conversation, sampling: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationStream:
        """The answer to a conversation, chunk by chunk."""
        return GenerationStream(self._client.stream_chat(messages, sampling, **options), self._run)

    def explain(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> pb.Explanation:
        """Which group would answer the prompt now, and each group's cost in seconds. Nothing is generated."""
        return self._run(self._client.explain(prompt, **options))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> list[list[float]]:
        """The embedding of each prompt. See AsyncClient.embed."""
        return self._run(
            self._client.embed(
                prompts,
                pooling=pooling,
                dimensions=dimensions,
                normalize=normalize,
                cache_salt=cache_salt,
                timeout=timeout,
            )
        )

    def score(
        self, text: Prompt, others: Sequence[Prompt], *, pooling: str | None = None, timeout: float | None = None
    ) -> list[float]:
        """The cosine similarity of the embedding of `text` with that of each of `others`."""
        return self._run(self._client.score(text, others, pooling=pooling, timeout=timeout))

    def tokenize(self, prompt: str | Conversation, *, timeout: float | None = None) -> list[int]:
        """The token ids of a text, or of a conversation by the model's chat template."""
        return self._run(self._client.tokenize(prompt, timeout=timeout))

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids."""
        return self._run(self._client.detokenize(token_ids, timeout=timeout))

    def get_model(self, *, timeout: float | None = None) -> pb.GetModelResponse:
        """The served model: name, context length, block size, types and sampling defaults."""
        return self._run(self._client.get_model(timeout=timeout))

    async def _end_calls(self) -> None:
        await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:  # those that wait between two routers, for example
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's event loop and wait for it. Ctrl-C cancels it."""
        with self._lock:
            if self._is_closed:
                call.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(CLOSED_DURING_CALL) from None
        except BaseException:
            future.cancel()
            raise
