"""Traces from a client's span to the engine's, through real gRPC and HTTP, to a real collector."""

import asyncio
import itertools
import logging
import subprocess
import sys
from pathlib import Path

import grpc
import openai
import pytest

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, TokenIds
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from coatcheck.proto.tracing import Tracing, check_endpoint
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.tiny_tokenizer import write_model
from tests.system.traced_router import Collector, FailingRunner, Group, Span, traced_router

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ROUTER = ("router.request", "router.admission", "router.queue", "router.route", "group.submit")
ENGINE = ("engine.queue", "engine.prefill", "engine.decode")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerJson:
    """A small tokenizer."""
    directory: Path = write_model(tmp_path_factory.mktemp("tokenizer"))
    return TokenizerJson.load(str(directory))


def question(**more: object) -> GenerateRequest:
    ids = TokenIds(ids=range(2, 42))
    return GenerateRequest(token_ids=ids, sampling=SamplingParams(max_tokens=6, seed=1, ignore_eos=True), **more)  # type: ignore[arg-type]


def check_tree(collector: Collector, trace: str, parent: str) -> dict[str, Span]:
    """Check the spans of one request: each exists once, below its parent and within the parent's time."""
    assert sorted(span.name for span in collector.spans) == sorted((*ROUTER, *ENGINE))
    spans = {span.name: span for span in collector.spans}
    assert {span.trace for span in spans.values()} == {trace}
    whole, submit = spans["router.request"], spans["group.submit"]
    assert whole.parent == parent
    assert {spans[name].parent for name in ROUTER[1:]} == {whole.id}
    assert {spans[name].parent for name in ENGINE} == {submit.id}
    parts = [spans[name] for name in ROUTER[1:]]
    assert all(one.ended <= other.began for one, other in itertools.pairwise(parts))
    assert whole.began <= parts[0].began and parts[-1].ended <= whole.ended
    queue, prefill, decode = (spans[name] for name in ENGINE)
    assert queue.began <= queue.ended == prefill.began <= prefill.ended == decode.began <= decode.ended
    assert decode.ended <= submit.ended + 50_000_000  # of another thread, which may be a little late
    assert {spans[name].service for name in ENGINE} == {"coatcheck-group"}
    assert {spans[name].service for name in ROUTER} == {"coatcheck-router"}
    return spans


async def test_from_a_grpc_client_to_the_engine(tokenizer: TokenizerJson) -> None:
    """The client's span is the parent of the router's span, and the router's is the parent of the group's, across the
    stream."""
    async with Collector() as collector:
        async with (
            traced_router(tokenizer, collector.endpoint) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            call = GenerationStub(channel).GenerateStream(
                question(request_id="mine"), metadata=(("traceparent", PARENT), ("tracestate", "a=b"))
            )
            assert [event async for event in call][-1].HasField("final")
        spans = check_tree(collector, TRACE, SPAN)
    whole = spans["router.request"].attributes
    assert (whole["request_id"], whole["group"], whole["completion_tokens"]) == ("mine", "g0", 6)
    assert spans["router.route"].attributes["candidates"] == 1
    assert (
        spans["engine.decode"].attributes["tokens"] == 6 and spans["engine.prefill"].attributes["prompt_tokens"] == 40
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_from_an_http_client_to_the_engine(tokenizer: TokenizerJson, stream: bool) -> None:
    """With a W3C traceparent header from OpenAI's client, the spans are below the client's span."""
    async with Collector() as collector:
        async with traced_router(tokenizer, collector.endpoint) as (router, _):
            async with openai.AsyncOpenAI(base_url=f"http://{router.http_address}/v1", api_key="none") as client:
                answer = await client.completions.create(
                    model="tiny",
                    prompt=list(range(2, 42)),
                    max_tokens=6,
                    stream=stream,
                    extra_headers={"traceparent": PARENT},
                    extra_body={"ignore_eos": True},
                )
                if stream:
                    assert [chunk async for chunk in answer]  # type: ignore[union-attr]
        check_tree(collector, TRACE, SPAN)


async def test_a_failover_is_part_of_its_trace(tokenizer: TokenizerJson, caplog: pytest.LogCaptureFixture) -> None:
    """A stream whose group dies continues elsewhere below the same client span, with each group's spans below its own
    submission. The router and both groups log the same request id."""
    caplog.set_level(logging.INFO)
    async with Collector() as collector:
        runner = FailingRunner(steps=3)
        failing = Group("failing", Tracing.export_to(collector.endpoint, "coatcheck-group", "failing"), runner)
        async with (
            traced_router(tokenizer, collector.endpoint, failing) as (router, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            metadata = (("traceparent", PARENT),)
            call = aiter(GenerationStub(channel).GenerateStream(question(request_id="mine"), metadata=metadata))
            events = [await anext(call), await anext(call)]
            assert events[0].started.group == "failing" and events[1].delta.token_ids
            other = Group("other", Tracing.export_to(collector.endpoint, "coatcheck-group", "other"))
            await router.set_groups([failing.address, other.address])
            while len(router.groups.serving()) < 2:
                await router.groups.next_change.wait()
            runner.may_raise.set()
            events += [event async for event in call]
            assert (events[-1].final.group, events[-1].final.moves) == ("other", 1)
        await asyncio.to_thread(other.stop)
        spans = collector.spans
    assert {span.trace for span in spans} == {TRACE}
    (whole,) = collector.named("router.request")
    assert whole.parent == SPAN and whole.attributes["moves"] == 1 and not whole.failed
    submits = {str(span.attributes["group"]): span for span in collector.named("group.submit")}
    assert {(name, span.parent, span.failed) for name, span in submits.items()} == {
        ("failing", whole.id, True),
        ("other", whole.id, False),
    }
    assert submits["failing"].ended <= submits["other"].began
    for group, submit in submits.items():
        parts = [span for span in spans if span.service == "coatcheck-group" and span.attributes["group"] == group]
        assert {span.parent for span in parts} == {submit.id} and {"engine.queue", "engine.prefill"} <= {
            span.name for span in parts
        }
    (last,) = [span for span in collector.named("engine.decode") if span.attributes["group"] == "other"]
    assert last.attributes["tokens"] == 3 and last.attributes["finish"] == "length"
    lines = [vars(line) for line in caplog.records if "request_id" in vars(line)]
    assert {line["request_id"] for line in lines} == {"mine"}
    assert sorted((line["message"], line["group"]) for line in lines) == [
        ("a request lost its group", "failing"),
        ("request ended", "other"),
        ("submission ended", "failing"),
        ("submission ended", "other"),
    ]


async def test_a_request_without_context_begins_a_trace(tokenizer: TokenizerJson) -> None:
    """Without a trace context, or with a malformed one, the router's span is the root."""
    async with Collector() as collector:
        async with (
            traced_router(tokenizer, collector.endpoint) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            await GenerationStub(channel).Generate(question(), metadata=(("traceparent", "nonsense"),))
        check_tree(collector, collector.spans[0].trace, "")


async def test_what_is_refused_is_a_span_that_failed(tokenizer: TokenizerJson) -> None:
    """A refused request has no group span, and the router's span has the error."""
    async with Collector() as collector:
        async with (
            traced_router(tokenizer, collector.endpoint) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await GenerationStub(channel).Generate(GenerateRequest())
        assert sorted(span.name for span in collector.spans) == ["router.admission", "router.request"]
        assert all(span.failed for span in collector.spans)


async def test_nobody_traces_unless_asked(tokenizer: TokenizerJson) -> None:
    """Without an endpoint nothing is sent, the group gets no trace context, and the OpenTelemetry libraries are not
    imported."""
    async with traced_router(tokenizer, None) as (router, address), grpc.aio.insecure_channel(address) as channel:
        await GenerationStub(channel).Generate(question(), metadata=(("traceparent", PARENT),))
        assert router.traffic.active == 0
    program = (
        "import coatcheck.router.server, coatcheck.workers.service.worker_service, sys; "
        "print('opentelemetry.sdk' in sys.modules)"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_an_endpoint_is_an_address() -> None:
    """An endpoint that is not an address is refused with what to write; no endpoint means no tracing."""
    with pytest.raises(InvalidConfig, match=r"such as http://127\.0\.0\.1:4317"):
        check_endpoint("127.0.0.1:4317")
    assert Tracing.export_to(None, "a", "b") is None
