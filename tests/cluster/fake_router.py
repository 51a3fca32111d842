"""FakeRouter: the public gRPC service in this process, with made-up tokens, for the tests of the client. A token
depends on (seed, choice, position) alone, as a real one does, so that a resumed stream can be compared with an
undisturbed one. `requests` has every request that came."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Self

import grpc

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

PIECES = [" one", " two", " drei", " vier", " ☂", " six", " sept", " acht"]


def token(seed: int, choice: int, position: int) -> int:
    """The token at `position` of a choice."""
    return hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=2).digest()[0] % len(PIECES)


class FakeRouter(GenerationServicer):
    """Answers at `address`. `losses`: for each of the next streams, the number of events until it breaks.
    `max_streams`: of one connection; None: no limit."""

    def __init__(
        self,
        name: str = "group-0",
        *,
        losses: list[int] | None = None,
        port: int = 0,
        max_streams: int | None = None,
    ) -> None:
        self.name = name
        self.fingerprint = "f"
        self.losses = losses or []
        self.requests: list[pb.GenerateRequest] = []
        self.running = self.most_at_once = 0
        # No stream sends an event before this many run at once.
        self.crowd = 1
        self._crowded = asyncio.Event()
        self._arrived = asyncio.Event()
        # Set once a caller has cancelled a stream.
        self.left = asyncio.Event()
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.breaks_with = grpc.StatusCode.UNAVAILABLE
        # After this many events a stream sends nothing more until it is cancelled.
        self.stalls_after: int | None = None
        self._port = port
        self._options = [] if max_streams is None else [("grpc.max_concurrent_streams", max_streams)]

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=self._options)
        add_GenerationServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(None)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def crowded(self, count: int) -> None:
        """Wait until `count` streams run."""
        while self.running < count:
            await self._arrived.wait()
            self._arrived.clear()

    async def requested(self, count: int) -> None:
        """Wait until `count` streams have come."""
        while len(self.requests) < count:
            await self._arrived.wait()
            self._arrived.clear()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="fake", vocab_size=100, max_model_len=4096, fingerprint=self.fingerprint)

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        if self.refusal:
            await context.abort(*self.refusal)
        budget = self.losses.pop(0) if self.losses else None
        self.running += 1
        self._arrived.set()
        self.most_at_once = max(self.most_at_once, self.running)
        if self.running >= self.crowd:
            self._crowded.set()
        try:
            await self._crowded.wait()
            for sent, event in enumerate(self._events(request)):
                if sent == budget:
                    await context.abort(self.breaks_with, "this router is going away")
                if sent == self.stalls_after:
                    await asyncio.Event().wait()
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: cancelled while an event is being sent
            self.left.set()
            raise
        finally:
            self.running -= 1

    def _events(self, request: pb.GenerateRequest) -> list[pb.GenerateEvent]:
        sampling = request.sampling
        seed = sampling.seed if sampling.HasField("seed") else 7
        prompt = len(request.token_ids.ids) or len(request.text.split()) or len(request.chat.messages)
        n, total = sampling.n or 1, sampling.max_tokens or 5
        held = {resumed.choice: len(resumed.token_ids) for resumed in request.resume}
        started = pb.Started(
            request_id=request.request_id or "r1", model="fake", seed=seed, group=self.name, prompt_tokens=prompt
        )
        events = [pb.GenerateEvent(started=started)]
        if sampling.HasField("prompt_logprobs"):
            logprobs = [pb.TokenLogprob(token_id=3, logprob=-1.5, rank=2)]
            events.append(pb.GenerateEvent(prompt_logprobs=pb.PromptLogprobs(tokens=logprobs)))
        for position in range(total):
            for choice in range(n):
                if position < held.get(choice, 0):
                    continue
                chosen = token(seed, choice, position)
                delta = pb.Delta(choice=choice, text=PIECES[chosen], token_ids=[chosen])
                if sampling.HasField("logprobs"):
                    top = [pb.TopLogprob(token_id=chosen, logprob=-0.5)] * sampling.logprobs
                    delta.logprobs.append(pb.TokenLogprob(token_id=chosen, logprob=-0.5, rank=1, top=top))
                if position == total - 1:
                    delta.finish_reason = pb.FINISH_REASON_LENGTH
                events.append(pb.GenerateEvent(delta=delta))
        usage = pb.Usage(prompt_tokens=prompt, completion_tokens=n * total, cached_device_tokens=prompt // 2)
        final = pb.Final(usage=usage, group=self.name, routed_by="most of its prefix is there", moves=0)
        events.append(pb.GenerateEvent(final=final))
        return events


@contextmanager
def in_background(*routers: FakeRouter) -> Iterator[None]:
    """Run the routers on an event loop of their own thread, for commands that need the main thread."""
    loop, servers = asyncio.new_event_loop(), AsyncExitStack()

    async def start() -> None:
        for router in routers:
            await servers.enter_async_context(router)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield
    finally:
        asyncio.run_coroutine_threadsafe(servers.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
