"""`coatcheck serve`: brings a cluster up, shows how far it is, and ends it when told.

It only watches: on a cluster of its own choosing the supervisor goes on without it, and the same command finds it
again. A Ray that it started ends with it. Ray is imported once the settings are known to make sense.
"""

import socket
from pathlib import Path
from typing import Annotated

import typer

from ..proto.errors import InvalidConfig
from .config import DEFAULT_HTTP_PORT, DEFAULT_PORT, ServeConfig
from .exposure import check_credentials
from .machine_check import check_machine
from .model_check import check_model
from .ray_address import find_ray
from .serving import Serving
from .stop_signals import Signals


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
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences that run at once in a group. Default 256.")
    ] = None,
    max_queued: Annotated[
        int | None, typer.Option(help="Most requests that wait for room in a group. Default 1024.")
    ] = None,
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
    settings = ServeConfig.build(flags, file)
    settings.check_model_directory()
    check_model(settings)
    check_machine(settings)
    _check_ports(settings)
    check_credentials(settings)
    if settings.ray_address is not None:
        settings = settings.model_copy(update={"ray_address": find_ray(settings.ray_address)})
    raise typer.Exit(Serving(settings, signals).run())


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
