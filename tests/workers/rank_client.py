"""A router's part towards a rank: one request over the worker stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub


def generate(address: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens over the worker stream."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    submit = wire.Submit(id=1, prompt_token_ids=prompt, sampling=sampling)
    tokens: list[int] = []
    answered = threading.Event()
    with grpc.insecure_channel(address) as channel:
        sent = [wire.ToGroup(hello=wire.Hello(router="test")), wire.ToGroup(submit=submit)]
        stream = WorkerStub(channel).Attach(_then_wait(sent, answered))
        for message in stream:
            for output in message.batch.outputs:
                tokens += output.token_ids
                if output.finish_reason:
                    answered.set()
                    return tokens
    raise AssertionError(f"the stream ended after {tokens}")


def _then_wait(messages: list[wire.ToGroup], answered: threading.Event) -> Iterator[wire.ToGroup]:
    yield from messages
    answered.wait(60)
