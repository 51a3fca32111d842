"""The two ends of the router's benchmarks, each in its own process: a scripted group, and a client that counts tokens.

The group is a real Worker service without a model, for any number of routers.
"""

import asyncio
import time
from multiprocessing.connection import Connection

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coatcheck.proto.internal_tls import ClusterCertificate, add_internal_port, internal_channel
from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_UNSPECIFIED,
    GenerateEvent,
    GenerateRequest,
    GetModelResponse,
    SamplingParams,
    TokenIds,
)
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from coatcheck.proto.stubs.worker_pb2 import (
    FromGroup,
    Load,
    Registration,
    SequenceOutput,
    SnapshotChunk,
    StepBatch,
    Submit,
    ToGroup,
)
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from coatcheck.router.text.tokenizer import TokenizerJson

VOCAB = 256


def run_group(pipe: Connection, streams: int, pace: float, certificate: ClusterCertificate | None) -> None:
    """A group that answers `streams` requests in lockstep, a token each per step."""

    class Counting(WorkerServicer):
        async def Attach(self, requests: object, context: "grpc.aio.ServicerContext[ToGroup, FromGroup]") -> None:
            await context.read()
            model = GetModelResponse(name="m", max_model_len=1 << 20, vocab_size=VOCAB, block_size=16)
            await context.write(
                FromGroup(registration=Registration(group="g", epoch="1", model=model, num_blocks=99999))
            )
            await context.write(FromGroup(snapshot=SnapshotChunk(epoch="1", first=True, last=True)))
            while True:
                submits: list[Submit] = []
                while len(submits) < streams:
                    message = await context.read()
                    if isinstance(message, ToGroup) and message.HasField("submit"):
                        submits.append(message.submit)
                ids = [submit.id for submit in submits]
                await self._steps(context, ids, submits[0].sampling.max_tokens)

        async def _steps(
            self, context: "grpc.aio.ServicerContext[ToGroup, FromGroup]", ids: list[int], steps: int
        ) -> None:
            clock = asyncio.get_running_loop().time
            began = clock()
            for step in range(steps):
                last = FINISH_REASON_LENGTH if step + 1 == steps else FINISH_REASON_UNSPECIFIED
                outputs = [SequenceOutput(id=id, token_ids=[97 + step % 26], finish_reason=last) for id in ids]
                await context.write(FromGroup(batch=StepBatch(step=step, outputs=outputs)))
                if step % 50 == 0:
                    await context.write(FromGroup(load=Load()))
                if pace:
                    await asyncio.sleep(began + (step + 1) / pace - clock())

    async def serve() -> None:
        server = grpc.aio.server()
        add_WorkerServicer_to_server(Counting(), server)  # type: ignore[no-untyped-call]  # made by protoc
        pipe.send(add_internal_port(server, "127.0.0.1:0", certificate))
        await server.start()
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(0)

    asyncio.run(serve())


def run_client(pipe: Connection, address: str, streams: int, tokens: int, own: ClusterCertificate | None) -> None:
    """Read all streams to their ends; send (tokens, deltas, seconds) through `pipe`."""

    async def read(stub: GenerationStub) -> tuple[int, int]:
        sampling = SamplingParams(max_tokens=tokens, seed=1)
        call = stub.GenerateStream(GenerateRequest(token_ids=TokenIds(ids=[65] * 16), sampling=sampling))
        count = deltas = 0
        while isinstance(event := await call.read(), GenerateEvent):  # anything else is the end
            if event.HasField("delta"):
                count += len(event.delta.token_ids)
                deltas += 1
        return count, deltas

    async def main() -> None:
        async with internal_channel(address, own) as channel:
            await channel.channel_ready()
            began = time.perf_counter()
            stub = GenerationStub(channel)  # type: ignore[no-untyped-call]  # made by protoc
            counts = await asyncio.gather(*(read(stub) for _ in range(streams)))
            pipe.send((sum(c for c, _ in counts), sum(d for _, d in counts), time.perf_counter() - began))

    asyncio.run(main())


def byte_tokenizer() -> TokenizerJson:
    """A token for each byte."""
    vocab = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerJson(tokenizer, None)
