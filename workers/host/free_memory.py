"""Free memory of a rank's device and host, and the peak of its own use."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def gpu_memory(device: "torch.device") -> tuple[int, int]:
    """(free, total) bytes of a GPU. Memory that torch's allocator has taken at its peak, and caches, is not free."""
    import torch  # imported late: `coatcheck serve` asks about hosts without torch

    return torch.cuda.mem_get_info(device)


def host_free_bytes() -> int:
    """Bytes that the host, or its container, can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    in_container = container_free_bytes(_CGROUP)
    return available if in_container is None else min(available, in_container)


def container_free_bytes(cgroup: Path) -> int | None:
    """Bytes below a container's memory limit; None without a limit.

    Inactive page cache counts as free, because the kernel reclaims it first. Otherwise a checkpoint that was just read
    would count as used memory.
    """
    try:
        limit, used = (int((cgroup / file).read_text()) for file in ("memory.max", "memory.current"))
        lines = (cgroup / "memory.stat").read_text().splitlines()
        inactive = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
    return max(limit - max(used - inactive, 0), 0)


def peak_bytes(device: "torch.device") -> int:
    """The peak of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
