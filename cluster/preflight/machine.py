"""Checks whether this machine has the memory, GPUs and ports that `coatcheck serve` needs, before Ray starts.

The checks are skipped if `serve` joins a Ray cluster, whose nodes may be other machines. Ranks and routers check again.
This module does not import torch or Ray.
"""

import socket
from pathlib import Path
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import host_port, listen
from coatcheck.workers.core.attention_selector import backend_name, check_backend_host, installed_libraries
from coatcheck.workers.core.group_config import is_share
from coatcheck.workers.host.free_memory import host_free_bytes

_LOOPBACK: Final = "127.0.0.1"  # where the processes of a local cluster listen
_CONNECT_SECONDS: Final = 5.0
# Device files of GPUs: NVIDIA's driver, NVIDIA Jetson (2), AMD, and WSL.
_GPU_FILES: Final = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "kfd", "dxg")


def check_memory(config: ServeConfig, free_bytes: int | None = None) -> None:
    """Raise InvalidConfig if host pools, and KV pools on CPUs, need more bytes in all than are free.

    `free_bytes`: measured if None. Sizes that are shares of the free memory are not checked.
    """
    if config.ray_address is not None:
        return
    free_bytes = host_free_bytes() if free_bytes is None else free_bytes
    sizes = {"host-kv-memory": config.host_kv_memory}
    if config.device == "cpu":
        sizes["kv-memory"] = config.kv_memory or 0.0
    sizes = {name: size for name, size in sizes.items() if not is_share(size)}
    ranks = config.groups * config.tp
    asked = int(sum(sizes.values()))
    if asked * ranks > free_bytes:
        names, ask = " and ".join(sizes), "asks" if len(sizes) == 1 else "ask"
        raise InvalidConfig(
            f"{names} {ask} for {asked:,} bytes for each of {ranks} ranks, and {free_bytes:,} bytes are free on this "
            f"host; lower {names}, groups or tp"
        )


def check_gpus(config: ServeConfig, devices: Path = Path("/dev")) -> None:
    """Raise InvalidConfig for device cuda on a machine without any GPU. Ray counts the GPUs later."""
    if config.ray_address is not None or config.device != "cuda":
        return
    if not has_gpu_file(devices):
        raise InvalidConfig(
            "device is cuda, and this machine has no GPU (/dev has no GPU device file); leave --device out, give the "
            "container its GPUs, or join a Ray cluster that has GPUs with --ray-address"
        )


def check_attention_backend(config: ServeConfig, devices: Path = Path("/dev")) -> None:
    """Raise InvalidConfig for an attention backend without its library or a GPU. Ranks compare the GPU itself."""
    if config.ray_address is not None:
        return
    device = config.device if config.device != "auto" else "cuda" if has_gpu_file(devices) else "cpu"
    check_backend_host(
        config.attention_backend,
        device=device,
        capabilities=[],
        is_installed=backend_name(config.attention_backend) in installed_libraries(),
    )


def has_gpu_file(devices: Path) -> bool:
    """Whether the folder `devices`, /dev, has the device file of a GPU."""
    return any(file for pattern in _GPU_FILES for file in devices.glob(pattern))


def check_ports(config: ServeConfig) -> None:
    """Raise InvalidConfig if the router could not listen on its addresses, or if processes of this host cannot reach
    each other."""
    if config.ray_address is not None:
        return
    _check_loopback()
    wanted = [("grpc", config.grpc_host, config.grpc_port), ("http", config.http_host, config.http_listen_port)]
    for flag, host, port in wanted:
        if not port:
            continue
        try:
            listen(host, port).close()
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]  # Python appends the address
            address = host_port(host, port)
            raise InvalidConfig(f"cannot listen on {address}: {reason}; choose another --{flag}-port") from None


def _check_loopback() -> None:
    """Some sandboxes leave the loopback interface down. Routers would then wait for their groups without end."""
    try:
        with listen(_LOOPBACK, 0) as listener:
            socket.create_connection(listener.getsockname(), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise InvalidConfig(
            f"processes of this host cannot reach each other at {_LOOPBACK}: {error.strerror or error}; bring the "
            "loopback interface up (`ip link set lo up`)"
        ) from None
