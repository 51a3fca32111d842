"""Latency of refusals and answers when clients send twice the requests that a group can serve.

Three processes: a scripted group (a real Worker service in which a request holds one of SLOTS slots for a fixed time),
this one with the router, and clients that send at a fixed rate, without waiting for answers.

    python bench/router_cases/overload.py [--seconds 20] [--times 2] [--queued 64]
"""

import asyncio
import json
import multiprocessing
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import grpc
import typer

from coatcheck.bench.router_cases.group_and_client import byte_tokenizer
from coatcheck.proto.stubs.coatcheck_pb2 import (
    FINISH_REASON_LENGTH,
    GenerateRequest,
    GetModelResponse,
    GroupStatus,
    SamplingParams,
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
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router

SLOTS, SERVICE_SECONDS = 16, 0.2
CAPACITY = SLOTS / SERVICE_SECONDS
PROMPT = "a coat check keeps what you hang there " * 40  # 1,560 tokens of the byte tokenizer


def _run_group(pipe: Connection) -> None:
    class Seated(WorkerServicer):
        async def Attach(self, requests: object, context: "grpc.aio.ServicerContext[ToGroup, FromGroup]") -> None:
            await context.read()
            model = GetModelResponse(name="m", max_model_len=1 << 20, vocab_size=256, block_size=16)
            registration = Registration(group="g", epoch="1", model=model, num_blocks=99999, max_num_seqs=SLOTS)
            await context.write(FromGroup(registration=registration))
            await context.write(FromGroup(snapshot=SnapshotChunk(epoch="1", first=True, last=True)))
            writing = asyncio.Lock()  # one write at a time
            waiting: deque[Submit] = deque()
            running: set[asyncio.Task[None]] = set()
            taken = 0

            async def answer(submit: Submit) -> None:
                await asyncio.sleep(SERVICE_SECONDS)
                output = SequenceOutput(id=submit.id, token_ids=[97] * 4, finish_reason=FINISH_REASON_LENGTH)
                async with writing:
                    await context.write(FromGroup(batch=StepBatch(outputs=[output])))

            def ended(task: "asyncio.Task[None]") -> None:
                running.discard(task)
                begin()

            def begin() -> None:
                while waiting and len(running) < SLOTS:
                    task = asyncio.create_task(answer(waiting.popleft()))
                    running.add(task)
                    task.add_done_callback(ended)

            async def report() -> None:
                while True:
                    status = GroupStatus(running=len(running), waiting=len(waiting), prefill_tokens_per_second=1e6)
                    async with writing:
                        await context.write(FromGroup(load=Load(status=status, submissions=taken)))
                    await asyncio.sleep(0.1)

            reporter = asyncio.create_task(report())
            while isinstance(message := await context.read(), ToGroup):
                if message.HasField("submit"):
                    taken += 1
                    waiting.append(message.submit)
                    begin()
            reporter.cancel()

    async def serve() -> None:
        server = grpc.aio.server()
        add_WorkerServicer_to_server(Seated(), server)  # type: ignore[no-untyped-call]  # made by protoc
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(0)

    asyncio.run(serve())


def _run_clients(pipe: Connection, address: str, rate: float, seconds: float) -> None:
    """Send `rate` requests a second. Send the seconds of each answer and of each refusal through `pipe`."""
    answered: list[float] = []
    refused: list[float] = []

    async def ask(stub: Any) -> None:
        began = time.perf_counter()
        try:
            await stub.Generate(GenerateRequest(text=PROMPT, sampling=SamplingParams(max_tokens=4, seed=1)))
            answered.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            refused.append(time.perf_counter() - began)

    async def main() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            stub = GenerationStub(channel)  # type: ignore[no-untyped-call]  # made by protoc
            began = time.perf_counter()
            asked = []
            for n in range(int(rate * seconds)):
                await asyncio.sleep(max(began + n / rate - time.perf_counter(), 0))
                asked.append(asyncio.create_task(ask(stub)))
            await asyncio.gather(*asked)
            pipe.send((answered, refused, time.perf_counter() - began))

    asyncio.run(main())


async def _measure(seconds: float, times: float, queued: int) -> dict[str, float]:
    processes = multiprocessing.get_context("spawn")
    group_pipe, group_end = processes.Pipe()
    client_pipe, client_end = processes.Pipe()
    group = processes.Process(target=_run_group, args=(group_end,), daemon=True)
    group.start()
    aside = asyncio.get_running_loop().run_in_executor
    port = await aside(None, group_pipe.recv)
    router = Router(RouterConfig(model="m", max_queued=queued), byte_tokenizer())
    address = await router.start()
    await router.set_groups([GroupEndpoint("g", f"127.0.0.1:{port}")])
    while not router.groups.serving():
        await router.groups.next_change.wait()
    clients = processes.Process(target=_run_clients, args=(client_end, address, times * CAPACITY, seconds), daemon=True)
    clients.start()
    answered, refused, took = await aside(None, client_pipe.recv)
    await router.stop()
    group_pipe.send("end")
    answered.sort()
    refused.sort()
    return {
        "asked_per_second": times * CAPACITY,
        "capacity_per_second": CAPACITY,
        "answered_per_second": len(answered) / took,
        "answered": len(answered),
        "refused": len(refused),
        "refusal_p50_ms": 1e3 * refused[len(refused) // 2] if refused else 0.0,
        "refusal_p99_ms": 1e3 * refused[int(0.99 * len(refused))] if refused else 0.0,
        "answer_p50_ms": 1e3 * answered[len(answered) // 2],
        "answer_p99_ms": 1e3 * answered[int(0.99 * len(answered))],
    }


def main(seconds: float = 20.0, times: float = 2.0, queued: int = 64) -> None:
    """Measure once."""
    print(json.dumps({name: round(value, 1) for name, value in asyncio.run(_measure(seconds, times, queued)).items()}))


if __name__ == "__main__":
    typer.run(main)
