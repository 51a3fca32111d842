"""Free memory of a rank's device and host, and the peak of its own use."""

import resource
from typing import TYPE_CHECKING

import psutil

from coatcheck.workers.host import cgroup_limits

if TYPE_CHECKING:
    import torch


def gpu_memory(device: "torch.device") -> tuple[int, int]:
    """(free, total) bytes of a GPU. Memory that torch's allocator has taken at its peak, and caches, is not free."""
    import torch  # imported late: `coatcheck serve` asks about hosts without torch

    return torch.cuda.mem_get_info(device)


def host_free_bytes() -> int:
    """Bytes that the host, or its container, can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    in_container = cgroup_limits.free_bytes()
    return available if in_container is None else min(available, in_container)


def peak_bytes(device: "torch.device") -> int:
    """The peak of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
