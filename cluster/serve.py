"""`coatcheck serve`: brings a cluster up, shows how far it is, and ends it when told.

It only watches: on a cluster of its own choosing the supervisor goes on without it, and the same command finds it
again. A Ray that it started ends with it. Ray is imported once the settings are known to make sense.
"""

import math
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..proto.errors import CoatcheckError, InvalidConfig, InvalidModel, Unavailable
from .config import DEFAULT_HTTP_PORT, DEFAULT_PORT, ServeConfig
from .counted import counted
from .exposure import check_credentials, warn_of_exposure
from .machine_check import check_machine
from .model_check import check_model
from .own_ray import known_to_its_user, ray_folder
from .ray_address import find_ray
from .ray_environment import confine_local_ray, environment_token, quiet_driver
from .ready_line import ready_line
from .stop_signals import EXIT_STOPPED, Signals

if TYPE_CHECKING:
    from .cluster_state import ClusterState

_POLL_SECONDS = 0.1
_WATCH_SECONDS = 0.5
_LOST_SECONDS = 60.0  # without an answer from the supervisor, which Ray restarts in less
_STOP_SECONDS = 15.0
_HESITATES_SECONDS = 10.0


def serve(
    model: Annotated[str | None, typer.Argument(help="A checkpoint directory or a hub id.")] = None,
    groups: Annotated[int | None, typer.Option(help="Number of tensor-parallel groups. Default 1.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks per group. Default 1.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster (HOST:PORT or auto). Default: start a local one.")
    ] = None,
    grpc_host: Annotated[str | None, typer.Option(help="Where the router listens. Default 127.0.0.1.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help=f"0: any free port. Default {DEFAULT_PORT}.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Where it listens for HTTP. Default 127.0.0.1.")] = None,
    http_port: Annotated[
        str | None,
        typer.Option(help=f"OpenAI's API. 0: any free port; none: no HTTP. Default {DEFAULT_HTTP_PORT}."),
    ] = None,
    router_resource: Annotated[
        str | None, typer.Option(help="A Ray resource of the nodes where the router may run. Default: any node.")
    ] = None,
    router_per_node: Annotated[
        bool | None, typer.Option("--router-per-node", help="A router on each node that may have one. Default: one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto (default): GPUs where there are any.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or auto (default): the checkpoint's.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="KV pool: bf16, fp16, fp8, int8, int4 or auto (default): as --dtype.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block: 8, 16 (default), 32, 64, 128.")] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="KV pool per rank: bytes (4GiB) or a share of the free memory (0.5). Default: by device."),
    ] = None,
    host_kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory per rank for prefix blocks that leave the pool: bytes or a share of the free memory."
            " Default 0: none."
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences that run at once in a group.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Most requests that wait for room in a group.")] = None,
    max_groups: Annotated[
        int | None, typer.Option(help="Up to so many groups while requests wait long. Default: no more than asked for.")
    ] = None,
    queue_target: Annotated[
        float | None, typer.Option(help="With --max-groups: seconds that requests may wait. Default 2.")
    ] = None,
    scale_in_after: Annotated[
        float | None, typer.Option(help="With --max-groups: idle seconds before a group ends. Default 600.")
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(help="Which cached block goes first: cost (default; worth least, learned) or lru."),
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens that a step computes. Default: by device.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence. Default: the model's.")] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic",
            help="The same bits for a request whatever shares its steps, cached or not, preempted or not.",
        ),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="What router and ranks log: text (default) or json, an object a line.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send traces to this collector, such as http://127.0.0.1:4317. Default: none.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the directory's name or the hub id.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="The router's certificate (PEM, on its host): TLS for gRPC and HTTP.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="Clients need a certificate of this authority: mutual TLS.")
    ] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="Tenants and hashes of their keys; see `coatcheck keys`. Read again on change.")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond loopback though anybody may come in.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of these settings; flags win over it.")] = None,
) -> None:
    """Serve MODEL until SIGINT or SIGTERM, which lets running requests end first; a second one does not."""
    flags = dict(locals())
    file = flags.pop("config")
    signals = Signals()
    try:
        settings = ServeConfig.build(flags, file)
        settings.check_model_directory()
        check_model(settings)
        check_machine(settings)
        _check_ports(settings)
        check_credentials(settings)
        if settings.ray_address is not None:
            settings = settings.model_copy(update={"ray_address": find_ray(settings.ray_address)})
    except (InvalidConfig, InvalidModel) as error:
        _fail(str(error), code=2)
    except CoatcheckError as error:
        _fail(str(error))
    try:
        code = Serving(settings, signals).run()
    except CoatcheckError as error:
        _fail(str(error))
    raise typer.Exit(code)


class Serving:
    """One run of the command."""

    def __init__(self, config: ServeConfig, signals: Signals) -> None:
        self._config = config
        self._signals = signals
        self._console = Console(stderr=True, highlight=False)
        self._supervisor: Any = None
        self._notes = ExitStack()  # left for other commands; taken back at the end
        self._has_served = False
        self._began = time.monotonic()
        if warning := warn_of_exposure(config):
            self._say(f"warning: {warning}")

    def run(self) -> int:
        """Returns the exit status; raises CoatcheckError for what keeps the cluster from serving."""
        quiet_driver()
        if self._config.ray_address is None:
            confine_local_ray()
        import ray

        try:
            self._connect()
            self._supervisor = self._find_or_start_supervisor()
            state = self._wait_until_ready()
            if state is not None:
                self._has_served = True
                self._say(ready_line(self._config, state))
                for more in state.routers[1:]:
                    self._say(f"another router at {more}")
                self._watch(state)
                self._drain()
        finally:
            self._notes.close()
            self._stop()
            ray.shutdown()
        return 0 if self._has_served and not self._signals.forced.is_set() else EXIT_STOPPED

    def _connect(self) -> None:
        from . import launch

        address = self._config.ray_address
        self._say(f"connecting to Ray at {address}" if address else "starting Ray")
        hesitates = f"{address or 'Ray'} has not answered for {_HESITATES_SECONDS:.0f} s; still trying"
        timer = threading.Timer(_HESITATES_SECONDS, self._say, [hesitates])
        timer.daemon = True
        timer.start()
        try:
            launch.connect(self._config)
        finally:
            timer.cancel()
        self._signals.install()
        if address is None:
            try:
                self._notes.enter_context(known_to_its_user(ray_folder(), launch.ray_address(), environment_token()))
            except OSError as error:
                self._say(f"warning: `coatcheck restart` will not find this Ray: {error}")

    def _find_or_start_supervisor(self) -> Any:
        import ray

        from . import launch
        from .placement import choose_placement

        config = self._config
        if running := launch.find_actor(launch.SUPERVISOR):
            found = ray.get(running.config.remote())
            launch.require_same(found, config)
            if found.groups != config.groups:
                now = counted(found.groups, "group")
                self._say(f"this cluster has {now}, which stay; `coatcheck scale --groups {config.groups}` changes it")
            self._signals.ends_at_once = False
            return running
        placement = choose_placement(config.device, config.groups, config.tp, launch.free_resources())
        groups, ranks = counted(config.groups, "group"), counted(config.tp, "rank")
        self._say(f"starting {groups} of {ranks} on {placement.device} ({self._elapsed()})")
        self._signals.ends_at_once = False
        return launch.start_supervisor(config, placement)

    def _wait_until_ready(self) -> "ClusterState | None":
        """Shows each rank's progress; None when told to stop before everything serves."""
        from .progress_bars import ProgressBars

        said = ""
        with ProgressBars(self._console) as bars:
            while not self._signals.asked.wait(_POLL_SECONDS):
                state = self._state()
                bars.show(state)
                if state.failure:
                    raise Unavailable(state.failure)
                if state.is_ready:
                    return state
                if state.stage not in (said, ""):
                    said = state.stage
                    self._say(f"{said} ({self._elapsed()})")
        return None

    def _watch(self, state: "ClusterState") -> None:
        """Says a line when a group is lost or serves again, until told to stop."""
        known = {group.name: group.state for group in state.groups}
        while not self._signals.asked.wait(_WATCH_SECONDS):
            state = self._state()
            if state.failure:
                raise Unavailable(state.failure)
            for group in state.groups:
                if known.get(group.name) != group.state and group.state != "starting":
                    known[group.name] = group.state
                    reason = f": {group.reason}" if group.reason else ""
                    self._say(f"{group.name} is {group.state}{reason}")

    def _drain(self) -> None:
        with self._console.status("draining: running requests end first; once more to stop at once"):
            self._wait_for(self._supervisor.drain.remote())

    def _stop(self) -> None:
        """Ends everything that the supervisor holds, then the supervisor."""
        import ray
        from ray.exceptions import RayError

        if self._supervisor is None:
            return
        with suppress(RayError):  # of a Ray that is gone: then so is all that ran on it
            if self._has_served and not self._signals.forced.is_set():
                self._wait_for(self._supervisor.stop.remote(), _STOP_SECONDS)
            elif self._config.ray_address is not None:  # on our own Ray everything ends with it
                ray.wait([self._supervisor.stop.remote(now=True)], timeout=_STOP_SECONDS)
            ray.kill(self._supervisor)

    def _wait_for(self, answer: Any, seconds: float = math.inf) -> None:
        """Until the answer is there, a second signal comes or the time is up."""
        import ray

        deadline = time.monotonic() + seconds
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            if self._signals.forced.is_set() or time.monotonic() > deadline:
                return

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    def _elapsed(self) -> str:
        return f"after {time.monotonic() - self._began:.1f} s"

    def _state(self) -> "ClusterState":
        import ray
        from ray.exceptions import RayError

        deadline = time.monotonic() + _LOST_SECONDS
        while True:
            try:
                state: ClusterState = ray.get(self._supervisor.state.remote(), timeout=10.0)
                return state
            except RayError as error:  # Ray is starting the supervisor again
                if time.monotonic() > deadline:
                    raise Unavailable(f"the supervisor does not answer: {type(error).__name__}") from None
                time.sleep(_POLL_SECONDS)


def _check_ports(config: ServeConfig) -> None:
    """Raises InvalidConfig when the router could not listen; on a remote cluster only the router can tell."""
    if config.ray_address is not None:
        return
    wanted = [("grpc", config.grpc_host, config.grpc_port), ("http", config.http_host, config.http_listen_port)]
    for flag, host, port in wanted:
        try:
            if port:
                socket.create_server((host, port)).close()
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]  # Python adds the address once more
            raise InvalidConfig(f"cannot listen on {host}:{port}: {reason}; choose another --{flag}-port") from None


def _fail(message: str, *, code: int = 1) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)  # one line, whatever a library has to say
    raise typer.Exit(code)
