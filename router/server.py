"""Router: the whole router process, without Ray.

    router = Router(config); address = await router.start(); await router.set_groups([...]); await router.stop()

The constructor is the wiring diagram. A gRPC call goes through GrpcHandlers, GenerateService, Dispatcher and
GroupRegistry; an HTTP request goes through HttpServer, middleware and OpenAIRoutes to the same GenerateService.

`python -m coatcheck.router.server MODEL --group NAME=HOST:PORT` runs a router in front of groups that run already.
"""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION_SERVICE
from prometheus_client import CollectorRegistry

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.generation_config import NO_DEFAULTS, sampling_defaults
from coatcheck.proto.host_port import host_port
from coatcheck.proto.log_lines import LogFormat, configure_logging
from coatcheck.proto.stubs.coatcheck_pb2 import StatusRequest, StatusResponse
from coatcheck.proto.tracing import Tracing
from coatcheck.router.access.authenticator import Authenticator
from coatcheck.router.access.connection_limits import GRPC_SHARE, HTTP_SHARE, max_connections, raise_open_files_limit
from coatcheck.router.access.server_certificate import ServerCertificate
from coatcheck.router.anthropic.routes import AnthropicRoutes
from coatcheck.router.config import MAX_STREAMS, MESSAGE_BYTES, RouterConfig
from coatcheck.router.connect_handlers import ConnectHandlers
from coatcheck.router.embeddings.routes import EmbeddingRoutes
from coatcheck.router.event_loop.side_process import SideProcesses
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import GroupListUpdate, GroupListVersion
from coatcheck.router.groups.group_metrics import GroupMetrics
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.grpc_handlers import ADMIN_SERVICE, GENERATION_SERVICE, GrpcHandlers
from coatcheck.router.grpc_services import add_small_services
from coatcheck.router.http.http_server import HttpServer
from coatcheck.router.http.middleware import wrap_app
from coatcheck.router.invocations import InvocationRoutes
from coatcheck.router.openai.routes import OpenAIRoutes
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.responses.routes import ResponsesRoutes
from coatcheck.router.serving.admin_service import AdminService
from coatcheck.router.serving.admission_queue import AdmissionQueue
from coatcheck.router.serving.dispatcher import Dispatcher
from coatcheck.router.serving.embed_service import EmbedService
from coatcheck.router.serving.generate_service import GenerateService
from coatcheck.router.telemetry.prometheus_page import PrometheusPage
from coatcheck.router.telemetry.request_metrics import RequestMetrics
from coatcheck.router.telemetry.traffic import Traffic
from coatcheck.router.text.tokenizer import TokenizerJson, find_files

_log = logging.getLogger(__name__)
_GRPC_OPTIONS: Final = [
    ("grpc.so_reuseport", 0),  # a port in use is an error
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # a response may be as long as the request asks for
    # Clients on long quiet streams may send a keepalive ping every ten seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # gRPC itself sets no limit. It keeps a stream until the handler of its call has run, even if the client has reset
    # it, and needs a megabyte for a head of 12,000 bytes that are references into HPACK's table. Without the limit one
    # connection that sent such heads took 2.4 GB in 9 s, and calls of other clients were cancelled. A client's library
    # lets further calls wait.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Calls that wait for the event loop. Beyond 1,000 gRPC's default is to cancel new ones at random, and beyond 3,000
    # all, with no status that says why. The router itself says why it refuses a call. 12 KB for each.
    ("grpc.server.max_pending_requests", 1 << 14),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 15),
    # A connection that does not speak HTTP/2 within this time is closed.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # If a client's host vanishes, its streams end and their blocks are freed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class Router:
    """Owns the gRPC and HTTP servers and their services. Construct and use it inside one event loop."""

    def __init__(
        self, config: RouterConfig, tokenizer: TokenizerJson | None = None, tracing: Tracing | None = None
    ) -> None:
        """Reads the model's tokenizer and generation_config.json, unless `tokenizer` is given. Raises InvalidModel if
        they cannot be read."""
        self.config = config
        self.certificate = ServerCertificate.load(config.tls_cert, config.tls_key, config.tls_client_ca)
        defaults = NO_DEFAULTS
        directory: Path | None = None
        if tokenizer is None:
            directory = find_files(config.model)
            tokenizer = TokenizerJson.load(str(directory))
            if config.generation_config == "auto":
                defaults = sampling_defaults(directory)

        self.groups = GroupRegistry(config)
        queue = AdmissionQueue(config.max_queued)
        self.dispatcher = Dispatcher(self.groups, queue, config.routing, config.move_wait_seconds)

        registry = CollectorRegistry()
        registry.register(GroupMetrics(self.groups, self.dispatcher.retries))
        request_metrics = RequestMetrics(registry)
        self.traffic = Traffic()
        self._tracing = tracing or Tracing.export_to(config.otlp_endpoint, "coatcheck-router", config.name)

        self._side = SideProcesses()
        planner = OutputPlanner(tokenizer, config.tool_parser)
        self.generation = GenerateService(
            config,
            tokenizer,
            planner,
            self.groups,
            self.dispatcher,
            self.traffic,
            request_metrics,
            self._side,
            self._tracing,
            defaults,
        )
        embedding = EmbedService(self.generation, directory)
        self.admin = AdminService(config, self.groups, self.dispatcher, self.traffic, request_metrics)
        self.metrics = PrometheusPage(self.admin.counts, registry)
        authenticator = Authenticator(config.key_file, on_refused=request_metrics.record_refusal)

        max_grpc_connections = ("grpc.max_allowed_incoming_connections", max_connections(GRPC_SHARE))
        self._grpc = grpc.aio.server(options=[*_GRPC_OPTIONS, max_grpc_connections])
        handlers = GrpcHandlers(
            self.generation, embedding, self.admin, authenticator, self._side, config.slow_reader_seconds
        )
        handlers.add_to(self._grpc)
        self._health = HealthServicer()
        services = (GENERATION_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE)
        add_small_services(self._grpc, self._health, services)
        self._health_updates: asyncio.Task[None] | None = None

        routes = OpenAIRoutes(
            self.generation,
            self.admin,
            tokenizer,
            self.metrics,
            self._side,
            planner,
            has_tokenizer_info=config.enable_tokenizer_info_endpoint,
            forces_usage=config.enable_force_include_usage,
        )
        AnthropicRoutes(routes.app, routes.chats)
        ResponsesRoutes(routes.app, routes.chats, routes.large)
        InvocationRoutes(routes, EmbeddingRoutes(routes.app, embedding, self.generation, routes.large))
        ConnectHandlers(routes.app, self.generation, embedding, self._side)
        app = wrap_app(
            routes.app,
            authenticator,
            request_metrics,
            check_host=config.checks_host,
            cors_origins=config.cors_origins,
            root_path=config.root_path,
        )
        self._http = HttpServer(
            app, self.certificate, config.slow_reader_seconds, on_refused=request_metrics.record_refusal
        )
        self.http_address = ""  # "host:port" once the router listens for HTTP

    async def start(self) -> str:
        """Listens; returns the "host:port" of gRPC. Raises InvalidConfig if a port cannot be bound."""
        address = self._listen_for_grpc()
        if self.config.http_port is not None:
            self._check_max_queued()
            self.http_address = await self._http.start(self.config.http_host, self.config.http_port)
        await self._publish_health()
        await self._grpc.start()
        self._health_updates = asyncio.create_task(self._follow_health())
        return address

    async def set_groups(self, groups: Sequence[GroupEndpoint]) -> None:
        """Replaces the groups. Requests that run on a group that is not in `groups` continue on another group."""
        await self.groups.set_endpoints(groups)

    async def update_groups(self, update: GroupListUpdate) -> GroupListVersion:
        """Applies a change of the supervisor's list of groups; see GroupRegistry.apply_update."""
        return await self.groups.apply_update(update)

    def set_configuration(self, text: str) -> None:
        """Sets StatusResponse.configuration to `text`."""
        self.admin.configuration = text

    async def status(self) -> StatusResponse:
        """What Admin.Status returns."""
        return await self.admin.status(StatusRequest())

    def announce_drain(self) -> None:
        """See AdminService.announce_drain."""
        self.admin.announce_drain()

    async def drain(self, timeout_seconds: float | None = None) -> bool:
        """Refuses new requests and waits for the open ones; returns whether all of them ended in time."""
        return await self.admin.drain_router(timeout_seconds)

    def undo_drain(self) -> None:
        """Allows new requests again."""
        self.admin.undo_router_drain()

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Stops everything; open requests get `grace_seconds` to end."""
        if self._health_updates is not None:
            self._health_updates.cancel()
            await asyncio.gather(self._health_updates, return_exceptions=True)
        await asyncio.gather(self._grpc.stop(grace_seconds), self._http.stop(grace_seconds))
        await self.groups.close()
        self.generation.close()
        self._side.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _listen_for_grpc(self) -> str:
        address = host_port(self.config.host, self.config.port)
        try:
            if self.certificate is None:
                port = self._grpc.add_insecure_port(address)
            else:
                port = self._grpc.add_secure_port(address, self.certificate.grpc_credentials())
        except RuntimeError as error:
            raise InvalidConfig(
                f"cannot listen on {address}, which is in use or no address of this host; choose another port, or 0 "
                "for any free one"
            ) from error
        return host_port(self.config.host, port)

    def _check_max_queued(self) -> None:
        if (count := max_connections(HTTP_SHARE)) < self.config.max_queued:
            _log.warning(
                "at most %d HTTP connections, fewer than max-queued (%d): further clients get 503; raise the limit of "
                "open files (ulimit -n)",
                count,
                self.config.max_queued,
            )

    async def _follow_health(self) -> None:
        while True:
            change = self.groups.next_change
            await self._publish_health()
            await change.wait()

    async def _publish_health(self) -> None:
        """Tells grpc.health.v1 whether a new request would be accepted."""
        status = health_pb2.HealthCheckResponse
        for service in ("", GENERATION_SERVICE):
            await self._health.set(service, status.SERVING if self.admin.state == "serving" else status.NOT_SERVING)


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or Hugging Face model id of the tokenizer.")],
    group: Annotated[list[str], typer.Option(help="NAME=HOST:PORT of a group's rank 0; may be repeated.")],
    host: str = "127.0.0.1",
    port: int = 50051,
    http_port: Annotated[int, typer.Option(help="0: any free port.")] = 8000,
    name: str = "router-0",
    served_model_name: Annotated[str, typer.Option(help="The name of the model that the groups serve.")] = "",
    log_format: Annotated[LogFormat, typer.Option(help="text or json.")] = "text",
) -> None:
    """Runs one router in front of groups that run already."""
    configure_logging(log_format, router=name)
    raise_open_files_limit()
    endpoints = [GroupEndpoint(name, address) for name, _, address in (entry.partition("=") for entry in group)]
    config = RouterConfig(model, served_model_name, name, host, port, http_host=host, http_port=http_port)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(config, endpoints))


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
