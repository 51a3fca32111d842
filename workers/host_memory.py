"""How many blocks a rank's host memory holds, and the memory itself.

`choose_host_blocks` is pure arithmetic. Every rank decides for itself, and the group takes the smallest answer.
"""

import weakref

import torch
from torch import Tensor

from ..proto.errors import InvalidConfig


def choose_host_blocks(host_kv_memory: float, *, free_bytes: int, sharing_ranks: int, bytes_per_block: int) -> int:
    """`host_kv_memory` above 1 is bytes for this rank, 0 is no host tier, else it is a share of `free_bytes`, divided
    among `sharing_ranks`. Raises InvalidConfig when the memory exceeds what is free, or cannot hold one block."""
    if not host_kv_memory:
        return 0
    host_bytes = int(host_kv_memory) if host_kv_memory > 1 else int(host_kv_memory * free_bytes / sharing_ranks)
    if host_bytes * sharing_ranks > free_bytes:
        raise InvalidConfig(
            f"host-kv-memory asks for {host_bytes:,} bytes for each of {sharing_ranks} ranks on this host, and "
            f"{max(free_bytes, 0):,} are free beside the KV pools; lower host-kv-memory, or set it to 0"
        )
    if host_bytes < bytes_per_block:
        raise InvalidConfig(
            f"host-kv-memory gives {max(host_bytes, 0):,} bytes a rank, and one block takes {bytes_per_block:,}; "
            "raise host-kv-memory, or set it to 0"
        )
    return host_bytes // bytes_per_block


def allocate_host(num_blocks: int, bytes_per_block: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, bytes_per_block], every page ours from the start; pinned where the device is a GPU."""
    host = torch.empty(num_blocks, bytes_per_block, dtype=torch.uint8).zero_()
    if device.type == "cuda":
        # Not by torch's own pinned memory, which rounds every size up to a power of two.
        runtime = torch.cuda.cudart()
        failure = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if failure:
            raise InvalidConfig(
                f"host-kv-memory: the driver does not pin {host.nbytes:,} bytes (CUDA error {failure}); lower it"
            )
        weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host
