"""MachineCheck: what this machine cannot hold of a `coatcheck serve` that starts its Ray here, said before it does.

A rank measures again, and has the last word. It knows neither torch nor Ray.
"""

from pathlib import Path
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.host.free_memory import host_free_bytes

# Device files of GPUs: NVIDIA's driver, NVIDIA Jetson (2), AMD, and WSL.
_GPU_FILES: Final = ("nvidia[0-9]*", "nvhost-gpu", "nvgpu", "kfd", "dxg")


def check_machine(config: ServeConfig, free_bytes: int | None = None) -> None:
    """Raises InvalidConfig for host tiers, and on CPUs pools, of more bytes in all than are free (None: here and now).
    Of shares, and of an existing Ray cluster's nodes, it says nothing."""
    if config.ray_address is not None:
        return
    free_bytes = host_free_bytes() if free_bytes is None else free_bytes
    sizes = {"host-kv-memory": config.host_kv_memory}
    if config.device == "cpu":
        sizes["kv-memory"] = config.kv_memory or 0.0
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = config.groups * config.tp
    asked = int(sum(sizes.values()))
    if asked * ranks > free_bytes:
        names, ask = " and ".join(sizes), "asks" if len(sizes) == 1 else "ask"
        raise InvalidConfig(
            f"{names} {ask} for {asked:,} bytes for each of {ranks} ranks, and {free_bytes:,} are free here; "
            f"lower {names}, groups or tp"
        )


def check_gpus(config: ServeConfig, devices: Path = Path("/dev")) -> None:
    """Raises InvalidConfig for device cuda on a machine without any GPU. Ray counts them later."""
    if config.ray_address is not None or config.device != "cuda":
        return
    if not any(file for pattern in _GPU_FILES for file in devices.glob(pattern)):
        raise InvalidConfig(
            "device is cuda, and this machine has no GPU (no device file of one in /dev); leave --device out, give the "
            "container its GPUs, or join a Ray cluster that has some with --ray-address"
        )
