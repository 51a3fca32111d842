"""MachineCheck: what this machine can never hold of a `coatcheck serve` that starts its Ray here.

A rank finds out what is free, and has the last word; this says at once what no rank will find. It knows neither torch
nor Ray.
"""

import os

from ..proto.errors import InvalidConfig
from .config import ServeConfig


def check_machine(config: ServeConfig, machine_bytes: int = 0) -> None:
    """Raises InvalidConfig for a host tier, or on CPUs a pool, of more than `machine_bytes`: by default all there are
    here. On an existing Ray cluster, whose nodes may be larger, it says nothing."""
    if config.ray_address is not None:
        return
    machine_bytes = machine_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = config.groups * config.tp
    asked = {"host-kv-memory": config.host_kv_memory}
    if config.device == "cpu":
        asked["kv-memory"] = config.kv_memory or 0.0
    for name, size in asked.items():
        if size > 1 and size * ranks > machine_bytes:
            raise InvalidConfig(
                f"{name} asks for {int(size):,} bytes for each of {ranks} ranks, and this machine has "
                f"{machine_bytes:,}; lower {name}" + (", groups or tp" if ranks > 1 else "")
            )
