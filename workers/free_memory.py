"""How much memory a rank may still take, and the most it has taken. It does not know what for."""

import resource
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device; for a CPU what the host or its container can still give without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left with torch's allocator is free as well
        return torch.cuda.mem_get_info(device)[0]
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return available if limit is None or used is None else min(available, max(limit - used, 0))


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cgroup_bytes(file: str) -> int | None:
    try:
        return int((_CGROUP / file).read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
