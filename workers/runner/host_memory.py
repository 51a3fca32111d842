"""The host tier's tensor: one rank's host memory for blocks that leave its pool. It does not know which they are."""

import weakref

import torch
from torch import Tensor

from coatcheck.proto.errors import InvalidConfig


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
