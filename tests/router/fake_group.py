"""FakeGroup: a gRPC Worker service on a real port, whose engine is a script.

Tokens are a function of (seed, choice, position), as they are in a real group, so that a stream that moved can be
compared with one that did not.
"""

import asyncio
import hashlib
import math
import struct
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import grpc

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.contract import CONTRACT, VERSION
from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GetModelResponse,
    GroupStatus,
    TokenLogprob,
    TopLogprob,
)
from coatcheck.proto.stubs.worker_pb2 import (
    Abort,
    FailureNotice,
    FirstOutput,
    FromGroup,
    KvEvent,
    KvEvents,
    Load,
    Refused,
    Registration,
    Returned,
    SequenceOutput,
    SnapshotChunk,
    StepBatch,
    Submit,
    ToGroup,
)
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from coatcheck.router.groups.group_endpoint import GroupEndpoint

EOS = 0
VOCAB = 600


def scripted_token(submit: Submit, choice: int, position: int) -> int:
    """A pseudo-random token that is not special."""
    digest = hashlib.sha256(f"{submit.sampling.seed}/{choice}/{position}".encode()).digest()
    return 2 + int.from_bytes(digest[:4], "little") % (VOCAB - 2)


def fake_embedding(token_ids: Sequence[int], pooling: int) -> list[float]:
    """The embedding that a FakeGroup returns: how often each of the first eight ids occurs, and the pooling."""
    return [*(float(sum(token % 8 == place for token in token_ids)) for place in range(8)), float(pooling)]


class FakeGroup(WorkerServicer):
    """`hold_after`: every choice stops at this number of output tokens until `go` is called. `chunk`: a prompt is
    scored in parts of this many tokens before the first output token; with `score_at_most` only up to that token.
    `finds`: cached tokens that the group reports for a prompt at most; None: as many as the router predicted.
    `with_tops`: log-probabilities include the most likely tokens. `failure_notice`: sent before `die_on_submit` or
    `poison` ends the stream."""

    def __init__(
        self,
        name: str = "g0",
        *,
        token: Callable[[Submit, int, int], int] = scripted_token,
        hold_after: int | None = None,
        model: GetModelResponse | None = None,
        num_blocks: int = 64,
        max_num_seqs: int = 0,
        refuse: tuple[int, str] | None = None,
        die_on_submit: bool = False,
        poison: int | None = None,
        failure_notice: str = "",
        chunk: int = 0,
        score_at_most: int | None = None,
        finds: int | None = None,
        with_tops: bool = False,
    ) -> None:
        self.name = name
        self.epoch = uuid.uuid4().hex
        self.model = model or GetModelResponse(
            name="tiny", max_model_len=256, vocab_size=VOCAB, block_size=4, dtype="float32", kv_dtype="float32",
            fingerprint="weights", eos_token_ids=[EOS],
        )  # fmt: skip
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.token = token
        self.hold_after = hold_after
        self.refuse = refuse
        self.die_on_submit = die_on_submit
        self.poison = poison
        self.failure_notice = failure_notice
        self.chunk = chunk
        self.score_at_most = score_at_most
        self.finds = finds
        self.with_tops = with_tops
        self.contract, self.version = CONTRACT, VERSION
        self.queued_tokens = 0  # prompt tokens that other routers have sent
        self.other_submissions = 0  # of other routers
        self.returns_all = False  # that may be returned
        self.returned = 0
        self.silent = False  # a stopped process: connected, and saying nothing
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.sent = 0  # tokens
        self.snapshot_requests = 0
        self.cache_resets = 0
        self.blocks: list[KvEvent] = []
        self.sequence = 0
        self.load = Load(status=GroupStatus(running=0, prefill_tokens_per_second=1000.0, step_seconds=0.01))
        self._streams: list[asyncio.Queue[FromGroup | None]] = []
        self._taken: dict[asyncio.Queue[FromGroup | None], int] = {}  # submissions, by stream
        self._changed = asyncio.Event()
        self._gone: set[tuple[int, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._port = 0

    async def start(self) -> GroupEndpoint:
        """Listens; a second call starts a new incarnation on the same port."""
        self.epoch = uuid.uuid4().hex
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_WorkerServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return GroupEndpoint(self.name, f"127.0.0.1:{self._port}")

    async def kill(self) -> None:
        """Breaks every stream at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._streams.clear()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def hang_up(self) -> None:
        """Ends every stream after the messages sent so far."""
        for stream in self._streams:
            stream.put_nowait(None)

    def crash(self, reason: str, unstarted: Iterable[int] = ()) -> None:
        """Sends a failure notice and ends every stream. `unstarted`: ids of submissions that had not started."""
        self.send(FromGroup(failure_notice=FailureNotice(reason=reason, unstarted=unstarted)))
        self.hang_up()

    async def attached(self) -> None:
        """Waits until a router has attached."""
        await self.until(lambda: bool(self._streams))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds` returns True; checks after each message that is received or sent."""
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def go(self, hold_after: int | None = None) -> None:
        """Sets `hold_after`, so that held choices continue."""
        self.hold_after = hold_after
        self._changed.set()

    def report(self, waiting: int, running: int = 0) -> None:
        """Reports this load to every router, with the number of submissions received so far."""
        self.load.status.waiting, self.load.status.running = waiting, running
        for stream in self._streams:
            message = FromGroup(load=self.load)
            message.load.submissions = self._taken[stream]
            message.load.all_submissions = self._taken[stream] + self.other_submissions
            stream.put_nowait(message)

    def send(self, message: FromGroup) -> None:
        """Sends a message to every attached router."""
        for stream in self._streams:
            stream.put_nowait(message)

    def send_events(self, *events: KvEvent, sequence: int | None = None, epoch: str | None = None) -> None:
        """Sends KV events with the next sequence number, or with the given `sequence` and `epoch`."""
        if sequence is None:
            sequence, self.sequence = self.sequence, self.sequence + len(events)
        self.send(FromGroup(events=KvEvents(epoch=epoch or self.epoch, sequence=sequence, events=events)))

    # A snake would be wrong here: gRPC looks the method up by its name in the contract.
    async def Attach(
        self, requests: AsyncIterator[ToGroup], context: grpc.aio.ServicerContext[ToGroup, FromGroup]
    ) -> AsyncIterator[FromGroup]:
        """The stream of one router."""
        outbox: asyncio.Queue[FromGroup | None] = asyncio.Queue()
        self._taken[outbox] = 0
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            del self._taken[outbox]
            if outbox in self._streams:
                self._streams.remove(outbox)

    async def _read(self, requests: AsyncIterator[ToGroup], outbox: "asyncio.Queue[FromGroup | None]") -> None:
        async for message in requests:
            if self.silent:
                continue
            match message.WhichOneof("message"):
                case "hello":
                    self._greet(outbox)
                case "submit":
                    self.submits.append(message.submit)
                    self._taken[outbox] += 1
                    if self.die_on_submit or list(message.submit.prompt_token_ids) == [self.poison]:
                        if self.failure_notice:
                            word = FailureNotice(reason=self.failure_notice)
                            outbox.put_nowait(FromGroup(failure_notice=word))
                        outbox.put_nowait(None)
                    elif self.refuse:
                        code, text = self.refuse
                        submit = message.submit
                        refused = Refused(id=submit.id, attempt=submit.attempt, code=code, message=text)
                        outbox.put_nowait(FromGroup(refused=refused))
                    elif self._returns(message.submit):
                        self.returned += 1
                        returned = Returned(
                            id=message.submit.id,
                            attempt=message.submit.attempt,
                            queued_prefill_tokens=self.queued_tokens,
                        )
                        outbox.put_nowait(FromGroup(returned=returned))
                    else:
                        self._spawn(message.submit, outbox)
                case "abort":
                    self.aborts.append(message.abort)
                    choices = [message.abort.choice] if message.abort.HasField("choice") else range(64)
                    self._gone |= {(message.abort.id, choice) for choice in choices}
                case "reset_prefix_cache":
                    self.cache_resets += 1
                case "snapshot":
                    self.snapshot_requests += 1
                    self._send_snapshot(outbox)
            self._changed.set()

    def _returns(self, submit: Submit) -> bool:
        if not submit.HasField("max_queued_tokens"):
            return False
        return self.returns_all or self.queued_tokens > submit.max_queued_tokens

    def _greet(self, outbox: "asyncio.Queue[FromGroup | None]") -> None:
        registration = Registration(
            group=self.name,
            epoch=self.epoch,
            model=self.model,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            contract=self.contract,
            version=self.version,
        )
        outbox.put_nowait(FromGroup(registration=registration))
        self._send_snapshot(outbox)
        outbox.put_nowait(FromGroup(load=self.load))
        self._streams.append(outbox)

    def _send_snapshot(self, outbox: "asyncio.Queue[FromGroup | None]") -> None:
        chunk = SnapshotChunk(epoch=self.epoch, sequence=self.sequence, events=self.blocks, first=True, last=True)
        outbox.put_nowait(FromGroup(snapshot=chunk))

    def _spawn(self, submit: Submit, outbox: "asyncio.Queue[FromGroup | None]") -> None:
        for choice in range(submit.sampling.n):
            task = asyncio.create_task(self._answer(submit, choice, outbox))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, submit: Submit, choice: int, outbox: "asyncio.Queue[FromGroup | None]") -> None:
        sampling = submit.sampling
        resumed = {part.choice: list(part.token_ids) for part in submit.resume}.get(choice, [])
        ends = {EOS, *self.model.eos_token_ids, *sampling.stop_token_ids}
        first = True
        scored: list[TokenLogprob] = []
        if sampling.HasField("prompt_logprobs") and choice == 0:
            tops = self._tops(sampling.prompt_logprobs)
            every = self._all() if sampling.prompt_logprobs == -1 else b""
            scored = [
                TokenLogprob(token_id=token, logprob=-2.0, rank=3, top=tops, all_logprobs=every)
                for token in submit.prompt_token_ids[1:]
            ]
        while self.chunk and scored:
            part, scored = scored[: self.chunk], scored[self.chunk :]
            done = len(submit.prompt_token_ids) - 1 - len(scored)
            if self.score_at_most is not None and done > self.score_at_most:
                await asyncio.Event().wait()  # until it is killed
            output = SequenceOutput(id=submit.id, attempt=submit.attempt, prompt_logprobs=part)
            outbox.put_nowait(FromGroup(batch=StepBatch(outputs=[output])))
        for position in range(len(resumed), sampling.max_tokens):
            if self.hold_after is not None and position >= self.hold_after:
                await self._released(position)
            if (submit.id, choice) in self._gone:
                return
            token = self.token(submit, choice, position)
            output = SequenceOutput(id=submit.id, attempt=submit.attempt, choice=choice, token_ids=[token])
            if sampling.HasField("logprobs"):
                tops = self._tops(sampling.logprobs)
                if sampling.logprob_token_ids:
                    tops = [TopLogprob(token_id=named, logprob=-0.5) for named in sampling.logprob_token_ids]
                every = self._all() if sampling.logprobs == -1 and not sampling.logprob_token_ids else b""
                output.logprobs.append(TokenLogprob(token_id=token, logprob=-1.0, rank=1, top=tops, all_logprobs=every))
            if first:
                first = False
                output.first_output.CopyFrom(FirstOutput(device_tokens=self._found(submit)))
                output.prompt_logprobs.extend(scored)
                if submit.pooling and choice == 0:
                    output.embedding.extend(fake_embedding(submit.prompt_token_ids, submit.pooling))
            if token in ends:
                output.finish_reason, output.stop_token_id = FINISH_REASON_STOP, token
            elif position + 1 == sampling.max_tokens:
                output.finish_reason = FINISH_REASON_LENGTH
            outbox.put_nowait(FromGroup(batch=StepBatch(step=position, outputs=[output])))
            self.sent += 1
            self._changed.set()
            if output.finish_reason:
                return
            await asyncio.sleep(0)

    def _tops(self, count: int) -> list[TopLogprob]:
        if not self.with_tops:
            return []
        return [TopLogprob(token_id=2 + place, logprob=-1.1 * place if place else -math.inf) for place in range(count)]

    def _all(self) -> bytes:
        """The largest is that of token 9, and the others fall with the token id."""
        return struct.pack(f"<{VOCAB}f", *(-0.25 if token == 9 else -1.0 - token / 8 for token in range(VOCAB)))

    def _found(self, submit: Submit) -> int:
        prompt = len(submit.prompt_token_ids)
        if self.finds is not None:
            return min(self.finds, prompt - 1)  # the last one is always computed
        return prompt - submit.uncached_tokens if submit.HasField("uncached_tokens") else 0

    async def _released(self, position: int) -> None:
        while self.hold_after is not None and position >= self.hold_after:
            self._changed.clear()
            await self._changed.wait()
