"""Traces and logs of a whole cluster for a stream whose group is killed."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2_grpc import GenerationStub
from tests.cluster.running_server import until
from tests.cluster.serving import Serving, kill
from tests.system.traced_router import Collector

pytestmark = [pytest.mark.full, pytest.mark.ray]
DEMO, TOKENS = Path(__file__).parents[2] / "demo" / "model", 1500
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_one_trace_and_one_id_from_client_to_both_groups() -> None:
    """The router's spans are below the client's span, and each group's spans below the router's submission to it. Each
    process logs the request id that the client gave."""
    async with Collector() as collector:
        flags = "--groups 2 --kv-memory 8MiB --grpc-port 0 --http-port none --log-format json --max-batch-tokens 16"
        with Serving(str(DEMO), *flags.split(), "--otlp-endpoint", collector.endpoint) as serving:
            await asyncio.to_thread(serving.wait_ready)
            question = GenerateRequest(
                text="def main",
                request_id="followed",
                sampling=SamplingParams(max_tokens=TOKENS, seed=1, ignore_eos=True),
            )
            async with grpc.aio.insecure_channel(serving.address) as channel:
                call = aiter(
                    GenerationStub(channel).GenerateStream(
                        question, metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),)
                    )
                )
                first = await anext(call)
                group = serving.group(first.started.group)
                kill(group["ranks"][0]["pid"])
                final = [event async for event in call][-1].final
            assert (final.moves, final.usage.completion_tokens) == (1, TOKENS) and final.group != first.started.group
            ends = {"router.request", "engine.decode"}  # which are sent every five seconds
            await asyncio.to_thread(until, lambda: ends <= {span.name for span in collector.spans}, "they have come")
            lines = logged(serving, "followed")
    assert {span.trace for span in collector.spans} == {TRACE}
    (whole,) = collector.named("router.request")
    lost, kept = collector.named("group.submit")
    assert whole.parent == SPAN and lost.parent == kept.parent == whole.id and lost.failed and not kept.failed
    (decode,) = [span for span in collector.named("engine.decode") if span.attributes["group"] == final.group]
    assert decode.parent == kept.id
    said = {(line["message"], line["group"]) for line in lines}
    assert {
        ("a request lost its group", first.started.group),
        ("submission ended", final.group),
        ("request ended", final.group),
    } <= said
    assert {line["level"] for line in lines} == {"info", "warning"} and len({line["time"] for line in lines}) > 1


def logged(serving: Serving, request_id: str) -> list[dict[str, Any]]:
    """What all processes have logged about a request."""
    found = re.search(r"--session[-_]dir=(\S+)", " ".join(serving.descendants().values()))
    assert found
    lines = []
    for path in Path(found[1], "logs").glob("worker-*.err"):
        lines += [json.loads(line) for line in path.read_text().splitlines() if f'"{request_id}"' in line]
    return lines
