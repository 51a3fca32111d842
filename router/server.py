"""Router: the front door in one process, without Ray.

    router = Router(config); address = await router.start(); await router.set_groups([...]); await router.stop()

`python -m coatcheck.router.server MODEL --group NAME=HOST:PORT` runs one against groups that are already there. It does
not know who starts groups or why they change.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Sequence
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.generation_config import NO_DEFAULTS, sampling_defaults
from coatcheck.proto.log_lines import configure_logging
from coatcheck.proto.stubs import coatcheck_pb2 as messages
from coatcheck.proto.tracing import Tracing
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.connection_limits import GRPC_SHARE, HTTP_SHARE, most_connections, raise_limit
from coatcheck.router.access.server_certificate import ServerCertificate
from coatcheck.router.config import MESSAGE_BYTES, RouterConfig
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_metrics import GroupFailureMetrics
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.index_metrics import IndexMetrics
from coatcheck.router.grpc_handlers import GrpcHandlers
from coatcheck.router.grpc_services import add_small_services
from coatcheck.router.http.http_server import HttpServer
from coatcheck.router.http.middleware import guarded
from coatcheck.router.openai.routes import OpenAIRoutes
from coatcheck.router.serving.admin_service import AdminService
from coatcheck.router.serving.admission_queue import AdmissionQueue
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.serving.generate_service import GenerateService
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from coatcheck.router.telemetry.traffic import Traffic
from coatcheck.router.text.tokenizer import TokenizerJson, find_files

_log = logging.getLogger(__name__)
_GENERATION = messages.DESCRIPTOR.services_by_name["Generation"].full_name
_ADMIN = messages.DESCRIPTOR.services_by_name["Admin"].full_name
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not something to share
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # an answer is as long as what was asked for
    # Clients on long quiet streams may ask every ten seconds whether we are still there.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Who connects says so in HTTP/2, or is gone.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A client whose machine has vanished is noticed, and its blocks freed, within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class Router:
    """Owns the gRPC and HTTP servers, the groups and the tokeniser. Make and use it inside one event loop."""

    def __init__(
        self, config: RouterConfig, tokenizer: TokenizerJson | None = None, tracing: Tracing | None = None
    ) -> None:
        """Reads the model's tokenizer and generation_config.json, unless `tokenizer` is given. Raises InvalidModel if
        they cannot be read."""
        self.config = config
        self.certificate = ServerCertificate.load(config.tls_cert, config.tls_key, config.tls_client_ca)
        line = AdmissionQueue(config.max_queued)
        self.groups = GroupRegistry(config, eased=line.move, groups_changed=line.reclassify)
        self.dispatch = Dispatcher(self.groups, line)
        registry = CollectorRegistry()
        registry.register(IndexMetrics(self.groups))
        registry.register(GroupFailureMetrics(self.groups.losses, self.dispatch.retries))
        measures = RequestMetrics(registry)
        self._gate = Authenticator(config.keys_file, on_refused=measures.refused)
        self.traffic = Traffic(measures)
        self.http_address = ""  # host:port once it listens, if it does
        self._tracing = tracing or Tracing.to(config.otlp_endpoint, "coatcheck-router", config.name)
        defaults = NO_DEFAULTS
        if tokenizer is None:
            directory = find_files(config.model)
            tokenizer = TokenizerJson.load(str(directory))
            if config.generation_config == "auto":
                defaults = sampling_defaults(directory)
        self._side = SideProcesses()
        self.generation = GenerateService(
            config, tokenizer, self.groups, self.dispatch, self.traffic, self._side, self._tracing, defaults
        )
        self.admin = AdminService(config, self.groups, self.dispatch, self.traffic)
        self.metrics = PrometheusPage(self.admin.counts, registry)
        api = OpenAIRoutes(self.generation, self.admin, tokenizer, self.metrics, self._side)
        self._http = HttpServer(
            guarded(api.app, self._gate, measures, local=config.answers_only_locally),
            self.certificate,
            config.slow_reader_seconds,
            on_refused=measures.refused,
        )
        most = most_connections(GRPC_SHARE)
        self._server = grpc.aio.server(options=[*_OPTIONS, ("grpc.max_allowed_incoming_connections", most)])
        self._health = HealthServicer()
        self._health_watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listens; returns gRPC's "host:port". Raises InvalidConfig when a port is taken."""
        self._add_services()
        try:
            port = self._listen(f"{self.config.host}:{self.config.port}")
        except RuntimeError as error:
            raise InvalidConfig(
                f"cannot listen on {self.config.host}:{self.config.port}, which is taken or not ours; "
                "choose another port, or 0 for any free one"
            ) from error
        if self.config.http_port is not None:
            if (most := most_connections(HTTP_SHARE)) < self.config.max_queued:
                _log.warning(
                    "at most %d HTTP connections, fewer than max-queued (%d): further clients hear 503; raise the "
                    "limit of open files (ulimit -n)",
                    most,
                    self.config.max_queued,
                )
            self.http_address = await self._http.start(self.config.http_host, self.config.http_port)
        await self._publish_health()
        await self._server.start()
        self._health_watch = asyncio.create_task(self._watch_health())
        return f"{self.config.host}:{port}"

    async def set_groups(self, groups: Sequence[GroupEndpoint], version: int = 0) -> None:
        """Replaces the groups; requests on one that is gone go on elsewhere. A list older than the newest is ignored
        (see Groups.set)."""
        await self.groups.set(groups, version)

    async def status(self) -> messages.StatusResponse:
        """As Admin.Status."""
        return await self.admin.status(messages.StatusRequest())

    async def drain(self, timeout_seconds: float | None = None) -> bool:
        """Takes no new requests and waits for the open ones; whether all ended in time."""
        return await self.admin.drain_router(timeout_seconds)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Ends everything; open requests get that long."""
        if self._health_watch is not None:
            self._health_watch.cancel()
            await asyncio.gather(self._health_watch, return_exceptions=True)
        await asyncio.gather(self._server.stop(grace_seconds), self._http.stop(grace_seconds))
        await self.groups.close()
        self.generation.close()
        self._side.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _listen(self, address: str) -> int:
        if self.certificate is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self.certificate.grpc_credentials())

    def _add_services(self) -> None:
        generation, admin = self.generation, self.admin
        edge = GrpcHandlers(self._gate, self.config.slow_reader_seconds, self._side)
        asked = messages.GenerateRequest
        methods = {
            "Generate": edge.unary(asked, generation.generate, knows=True, generates=True),
            "GenerateStream": edge.streaming(asked, generation.generate_stream, knows=True, generates=True),
            "Tokenize": edge.unary(messages.TokenizeRequest, generation.tokenize),
            "Detokenize": edge.unary(messages.DetokenizeRequest, generation.detokenize),
            "GetModel": edge.unary(messages.GetModelRequest, generation.get_model),
        }
        administration = {
            "Status": edge.unary(messages.StatusRequest, admin.status, "observe"),
            "Drain": edge.unary(messages.DrainRequest, admin.drain, "manage"),
            "Explain": edge.unary(asked, generation.explain, "observe", knows=True),
        }
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_GENERATION, methods),
                grpc.method_handlers_generic_handler(_ADMIN, administration),
            )
        )
        names = (_GENERATION, _ADMIN, HEALTH, reflection.SERVICE_NAME)
        add_small_services(self._server, self._health, names)

    async def _watch_health(self) -> None:
        while True:
            change = self.groups.next_change
            await self._publish_health()
            await change.wait()

    async def _publish_health(self) -> None:
        serving = self.admin.state == "serving"
        kinds = health_pb2.HealthCheckResponse
        for service in ("", _GENERATION):
            await self._health.set(service, kinds.SERVING if serving else kinds.NOT_SERVING)


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id; names the tokenizer.")],
    group: Annotated[list[str], typer.Option(help="NAME=HOST:PORT of a group's rank 0, by its name; may be repeated.")],
    host: str = "127.0.0.1",
    port: int = 50051,
    http_port: Annotated[int, typer.Option(help="0: any free port.")] = 8000,
    name: str = "router-0",
    served_model_name: Annotated[str, typer.Option(help="The model's name, as the groups have it.")] = "",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Runs one router against groups that are already there."""
    configure_logging(log_format, router=name)
    raise_limit()
    addresses = [GroupEndpoint(name, address) for name, _, address in (entry.partition("=") for entry in group)]
    with contextlib.suppress(KeyboardInterrupt):
        config = RouterConfig(model, served_model_name, name, host, port, http_host=host, http_port=http_port)
        asyncio.run(_serve(config, addresses))


async def _serve(config: RouterConfig, groups: Sequence[GroupEndpoint]) -> None:
    router = Router(config)
    print(f"router {config.name} listens on {await router.start()}, http on {router.http_address}", flush=True)
    await router.set_groups(groups)
    gc.freeze()  # see RouterActor.start
    try:
        await asyncio.Event().wait()
    finally:
        await router.stop(grace_seconds=1.0)


if __name__ == "__main__":
    typer.run(main)
