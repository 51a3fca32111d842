"""A real router and group over a fake runner, and an OpenTelemetry collector that receives their spans over gRPC."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.proto.tracing import Tracing
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.server import Router
from coatcheck.router.text.tokenizer import TokenizerJson
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.service.group_report import GroupReport
from coatcheck.workers.service.worker_service import WorkerService
from tests.workers.engine_thread import EngineThread
from tests.workers.fake_runner import SPEC, FakeRunner, FakeStep

BLOCK = 16


@dataclass(frozen=True)
class Span:
    """One span, as the collector received it."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, str | int | float | bool]


class Collector(TraceServiceServicer):
    """An OpenTelemetry collector on a gRPC port. An async context manager; `spans` has every received span."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def __aenter__(self) -> "Collector":
        self._server = grpc.aio.server()
        add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    # gRPC looks the method up by this name.
    async def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {
                        one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes
                    }
                    self.spans.append(
                        Span(
                            span.name,
                            service,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == 2,
                            values,
                        )
                    )
        return ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """The spans called `name`, in order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.began)


class FailingRunner(FakeRunner):
    """Computes `steps` steps. The next step raises once the event `may_raise` is set."""

    def __init__(self, steps: int) -> None:
        super().__init__(64, BLOCK)
        self.may_raise = threading.Event()
        self._left = steps

    def launch(self, plan: StepPlan) -> FakeStep:
        self._left -= bool(plan.scheduled)
        if self._left < 0:
            assert self.may_raise.wait(MAX_WAIT_SECONDS)
            raise RuntimeError("the step fails, as the test wants")
        return super().launch(plan)


class Group:
    """Rank 0's real service and engine, over a fake runner."""

    def __init__(self, name: str, tracing: Tracing | None, runner: FakeRunner | None = None) -> None:
        spec = dataclasses.replace(SPEC, name="tiny")
        engine = Engine(spec, runner or FakeRunner(64, BLOCK), num_blocks=64, block_size=BLOCK)
        model = public.GetModelResponse(
            name="tiny", max_model_len=1024, vocab_size=spec.vocab_size, block_size=BLOCK, fingerprint=spec.fingerprint
        )
        registration = wire.Registration(group=name, epoch=f"of {name}", num_blocks=64, model=model)
        ranks = [public.RankStatus(rank=0, healthy=True)]
        self._tracing = tracing
        self.service = WorkerService(GroupReport(registration, ranks), tracing=tracing)
        self.deaths: list[BaseException] = []
        self.loop = EngineThread(engine, on_step=self.service.publish, on_death=self._die)
        self.address = GroupEndpoint(name, self.service.start(self.loop, "127.0.0.1:0"))
        self.loop.start()

    def _die(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.service.stop()

    def stop(self) -> None:
        self.loop.stop()
        if not self.deaths:
            self.service.stop()
        if self._tracing is not None:
            self._tracing.close()


@asynccontextmanager
async def traced_router(
    tokenizer: TokenizerJson, endpoint: str | None, group: Group | None = None
) -> AsyncIterator[tuple[Router, str]]:
    """(router, its gRPC address) in front of one group. All spans have been sent when the context ends.

    `group`: a group whose engine may fail; without one the engine of the group must not fail.
    """
    may_fail, group = group is not None, group or Group("g0", Tracing.export_to(endpoint, "coatcheck-group", "g0"))
    router = Router(RouterConfig(model="tiny", http_port=0, otlp_endpoint=endpoint), tokenizer)
    address = await router.start()
    try:
        await router.set_groups([group.address])
        while not router.groups.serving():
            await router.groups.next_change.wait()
        yield router, address
    finally:
        await router.stop()
        await asyncio.to_thread(group.stop)
        assert may_fail or group.deaths == []
