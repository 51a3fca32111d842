"""`coatcheck serve`: brings a cluster up, shows how far it is, and ends it when told.

It only watches: on a cluster of its own choosing the supervisor goes on without it, and the same command finds it
again. A Ray that it started ends with it. Ray is imported once the settings are known to make sense.
"""

import socket
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coatcheck.cluster.commands.serve_session import ServeSession
from coatcheck.cluster.commands.stop_signals import StopSignals
from coatcheck.cluster.config.exposure import check_credentials
from coatcheck.cluster.config.serve_config import DEFAULT_HTTP_PORT, DEFAULT_PORT, FREE_SHARE, ServeConfig
from coatcheck.cluster.preflight.architecture import check_architecture
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.machine import check_gpus, check_machine
from coatcheck.cluster.preflight.model import check_model
from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.proto.errors import InvalidConfig

_MODEL = partial(typer.Option, rich_help_panel="Model")
_GROUPS = partial(typer.Option, rich_help_panel="Groups")
_MEMORY = partial(typer.Option, rich_help_panel="Memory")
_LIMITS = partial(typer.Option, rich_help_panel="Limits")
_ROUTER = partial(typer.Option, rich_help_panel="Router")
_SECURITY = partial(typer.Option, rich_help_panel="Security")
_RAY = partial(typer.Option, rich_help_panel="Ray")
_LOGS = partial(typer.Option, rich_help_panel="Logs and traces")

EPILOG = """\
Examples:

coatcheck serve demo/model --groups 2 --tp 2

coatcheck serve meta-llama/Llama-3.1-8B --kv-dtype fp8 --host-kv-memory 64GiB

coatcheck serve MODEL --groups 8 --tp 4 --ray-address auto

`coatcheck plan MODEL` says beforehand what fits.
"""


def serve(
    model: Annotated[str | None, typer.Argument(help="A checkpoint directory or a hub id.")] = None,
    served_model_name: Annotated[
        str | None, _MODEL(help="What clients call the model. Default: the directory's name or the hub id.")
    ] = None,
    device: Annotated[str | None, _MODEL(help="cpu, cuda or auto (default): GPUs where there are any.")] = None,
    dtype: Annotated[str | None, _MODEL(help="float32, bfloat16, float16 or auto (default): the checkpoint's.")] = None,
    max_model_len: Annotated[int | None, _MODEL(help="Longest sequence. Default: the model's.")] = None,
    generation_config: Annotated[
        str | None,
        _MODEL(
            help="Sampling of fields that requests leave unset: auto (default), from the model's "
            "generation_config.json; none, temperature 1 and no filter."
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        _MODEL(
            "--deterministic",
            help="The same bits for a request whatever shares its steps, cached or not, preempted or not. Refused for"
            " mixtures of experts.",
        ),
    ] = None,
    groups: Annotated[
        int | None, _GROUPS(help="Number of tensor-parallel groups, each a copy of the model. Default 1.")
    ] = None,
    tp: Annotated[int | None, _GROUPS(help="Ranks per group: GPUs that share one copy. Default 1.")] = None,
    max_groups: Annotated[
        int | None, _GROUPS(help="Most groups; one is added when requests wait too long. Default: as many as --groups.")
    ] = None,
    queue_target: Annotated[
        float | None, _GROUPS(help="With --max-groups: seconds that requests may wait. Default 2.")
    ] = None,
    scale_in_after: Annotated[
        float | None, _GROUPS(help="With --max-groups: idle seconds before a group ends. Default 600.")
    ] = None,
    kv_memory: Annotated[
        str | None,
        _MEMORY(
            help="KV pool per rank: bytes (4GiB), or a share of the memory that is free once the weights are loaded."
            f" Default {FREE_SHARE['cpu']:g} on CPUs, {FREE_SHARE['cuda']:g} on GPUs."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, _MEMORY(help="KV pool: bf16, fp16, fp8, int8, int4 or auto (default): as --dtype.")
    ] = None,
    host_kv_memory: Annotated[
        str | None,
        _MEMORY(
            help="Host memory per rank for prefix blocks that leave the pool: bytes or a share of the free memory."
            " Default 0: none."
        ),
    ] = None,
    eviction: Annotated[
        str | None, _MEMORY(help="Which cached block goes first: cost (default; worth least, learned) or lru.")
    ] = None,
    block_size: Annotated[int | None, _MEMORY(help="Tokens per KV block: 8, 16 (default), 32, 64, 128.")] = None,
    max_num_seqs: Annotated[
        int | None, _LIMITS(help="Most sequences that run at once in a group. Default 256.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, _LIMITS(help="Most tokens that a step computes. Default 512 on CPUs, 2048 on GPUs.")
    ] = None,
    max_queued: Annotated[
        int | None, _LIMITS(help="Most requests that wait for room in a group. Default 1024.")
    ] = None,
    grpc_host: Annotated[str | None, _ROUTER(help="Where the router listens. Default 127.0.0.1.")] = None,
    grpc_port: Annotated[int | None, _ROUTER(help=f"0: any free port. Default {DEFAULT_PORT}.")] = None,
    http_host: Annotated[str | None, _ROUTER(help="Where it listens for HTTP. Default 127.0.0.1.")] = None,
    http_port: Annotated[
        str | None, _ROUTER(help=f"OpenAI's API. 0: any free port; none: no HTTP. Default {DEFAULT_HTTP_PORT}.")
    ] = None,
    router_resource: Annotated[
        str | None, _ROUTER(help="A Ray resource of the nodes where the router may run. Default: any node.")
    ] = None,
    router_per_node: Annotated[
        bool | None, _ROUTER("--router-per-node", help="A router on each node that may have one. Default: one.")
    ] = None,
    api_keys: Annotated[
        str | None, _SECURITY(help="Tenants and hashes of their keys; see `coatcheck keys`. Read again on change.")
    ] = None,
    tls_cert: Annotated[
        str | None, _SECURITY(help="The router's certificate (PEM, on its host): TLS for gRPC and HTTP.")
    ] = None,
    tls_key: Annotated[str | None, _SECURITY(help="Its key.")] = None,
    tls_client_ca: Annotated[
        str | None, _SECURITY(help="Clients need a certificate of this authority: mutual TLS.")
    ] = None,
    insecure: Annotated[
        bool | None,
        _SECURITY("--insecure", help="Listen beyond loopback without asking clients for keys or certificates."),
    ] = None,
    ray_address: Annotated[
        str | None, _RAY(help="An existing Ray cluster (HOST:PORT or auto). Default: start a local one.")
    ] = None,
    ray_start_timeout: Annotated[
        float | None, _RAY(help="Seconds that Ray may take to start, or to answer at --ray-address. Default 120.")
    ] = None,
    log_format: Annotated[
        str | None, _LOGS(help="What router and ranks log: text (default) or json, an object a line.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, _LOGS(help="Send traces to this collector, such as http://127.0.0.1:4317. Default: none.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of these settings; flags win over it.")] = None,
) -> None:
    """Serve MODEL until SIGINT or SIGTERM. The first lets running requests end; a second one ends them at once."""
    flags = dict(locals())
    file = flags.pop("config")
    signals = StopSignals()
    settings = ServeConfig.build(flags, file)
    settings.check_model_directory()
    check_model(settings)
    check_machine(settings)
    check_gpus(settings)
    _check_ports(settings)
    check_credentials(settings)
    check_checkpoint(settings)
    check_architecture(settings, Console(stderr=True, highlight=False))
    if settings.ray_address is not None:
        settings = settings.model_copy(update={"ray_address": find_ray(settings.ray_address)})
    raise typer.Exit(ServeSession(settings, signals).run())


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
