"""MemoryBudget: the KV bytes that a rank takes at its start, on its device and in host memory; all there will ever be.

Every rank finds out what fits beside it, and the group takes the smallest answer. It does not know what blocks are for.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.rank_facts import gather
from coatcheck.workers.host.free_memory import free_bytes, host_free_bytes
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_host_blocks, choose_num_blocks
from coatcheck.workers.runner.host_memory import allocate_host
from coatcheck.workers.runner.kv_memory import allocate_pool


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBudget:
    """`pool` and `host` are uint8 [blocks, bytes_per_block]; `host` is None where there is no host tier."""

    layout: BlockLayout
    pool: Tensor
    host: Tensor | None

    @classmethod
    def take(
        cls,
        config: GroupConfig,
        layout: BlockLayout,
        communicator: Communicator,
        device: torch.device,
        *,
        ranks_on_host: int,
    ) -> Self:
        """Every rank at once. Raises InvalidConfig when the memory asked for is not there, or too little of it."""
        fits, host_fits = choose_blocks(
            config,
            layout,
            device_bytes=free_bytes(device),
            host_bytes=host_free_bytes(),
            on_cpu=device.type == "cpu",
            ranks_on_host=ranks_on_host,
        )
        everyone = gather(communicator, device, {"fits": fits, "host": host_fits})
        num_blocks, host_blocks = (min(facts[name] for facts in everyone) for name in ("fits", "host"))
        pool = allocate_pool(layout, num_blocks, device)
        return cls(layout, pool, allocate_host(host_blocks, layout.bytes_per_block, device) if host_blocks else None)

    @property
    def num_blocks(self) -> int:
        """On the device."""
        return len(self.pool)

    @property
    def host_blocks(self) -> int:
        """In host memory."""
        return 0 if self.host is None else len(self.host)

    @property
    def tokens(self) -> int:
        """What the pool holds."""
        return self.num_blocks * self.layout.block_size


def choose_blocks(
    config: GroupConfig, layout: BlockLayout, *, device_bytes: int, host_bytes: int, on_cpu: bool, ranks_on_host: int
) -> tuple[int, int]:
    """What one rank would have on its device and in host memory, of what is free there.

    A share is divided by all the ranks on the host. Bytes have to be there for this group's: the others may have theirs
    already, when a group starts again beside them. Raises InvalidConfig.
    """
    mine, block = min(config.tp, ranks_on_host), layout.bytes_per_block
    claimants = ranks_on_host if config.kv_memory <= 1 else mine
    fits = choose_num_blocks(
        config.kv_memory,
        free_bytes=device_bytes,
        sharing_ranks=claimants if on_cpu else 1,
        bytes_per_block=block,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
    )
    claimants = ranks_on_host if config.host_kv_memory <= 1 else mine
    left = host_bytes - (fits * block * mine if on_cpu else 0)
    others = fits * block * (claimants - mine) if on_cpu else 0
    if config.kv_memory > 1 and others >= left:  # then what is theirs is not among what is free: they have it already
        others = 0
    host_fits = choose_host_blocks(
        config.host_kv_memory,
        free_bytes=left - others,
        sharing_ranks=claimants,
        bytes_per_block=block,
    )
    return fits, host_fits
