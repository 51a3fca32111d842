"""A router's end of the worker stream: one request, or what a group says of itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2_grpc import WorkerStub


def generate(address: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens over the worker stream."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    submit = wire.Submit(id=1, prompt_token_ids=prompt, sampling=sampling)
    tokens: list[int] = []
    with grpc.insecure_channel(address) as channel, _attached(channel, wire.ToGroup(submit=submit)) as stream:
        for message in stream:
            for output in message.batch.outputs:
                tokens += output.token_ids
                if output.finish_reason:
                    return tokens
    raise AssertionError(f"the stream ended after {tokens}")


def read_registration(channel: grpc.Channel) -> wire.Registration:
    """What the group answers to a Hello."""
    with _attached(channel) as stream:
        return next(message.registration for message in stream if message.HasField("registration"))


def read_load(channel: grpc.Channel) -> wire.Load:
    """The group's next load report, which an idle group sends about once a second."""
    with _attached(channel) as stream:
        return next(message.load for message in stream if message.HasField("load"))


@contextmanager
def _attached(channel: grpc.Channel, *messages: wire.ToGroup) -> Iterator[Iterator[wire.FromGroup]]:
    """The group's messages on a stream that begins with a Hello and these messages."""
    left = threading.Event()

    def sent() -> Iterator[wire.ToGroup]:
        yield wire.ToGroup(hello=wire.Hello(router="test"))
        yield from messages
        left.wait(MAX_WAIT_SECONDS)

    try:
        yield WorkerStub(channel).Attach(sent(), timeout=MAX_WAIT_SECONDS)
    finally:
        left.set()
