"""How much memory a rank may still take, and the most it has taken. It does not know what for."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: "torch.device") -> int:
    """Free bytes of the device; for a CPU the host's."""
    if device.type != "cuda":
        return host_free_bytes()
    import torch  # here: of a host one may ask without it

    torch.cuda.empty_cache()  # what loading has left with torch's allocator is free as well
    return torch.cuda.mem_get_info(device)[0]


def host_free_bytes() -> int:
    """What the host or its container can still give without swapping."""
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    in_container = container_free_bytes(_CGROUP)
    return available if in_container is None else min(available, in_container)


def container_free_bytes(cgroup: Path) -> int | None:
    """What a container's limit leaves; None where there is none. Files that were read and are not in use count as
    free, as the kernel gives them up first: else a checkpoint just read would look like memory taken."""
    try:
        limit, used = (int((cgroup / file).read_text()) for file in ("memory.max", "memory.current"))
        lines = (cgroup / "memory.stat").read_text().splitlines()
        idle = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
    return max(limit - max(used - idle, 0), 0)


def peak_bytes(device: "torch.device") -> int:
    """The most that this process has held: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
