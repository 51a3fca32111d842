"""MemoryBudget: the KV blocks that a rank allocates at startup, on its device and in host memory.

Every rank computes how many blocks fit on its machine, and the group takes the minimum. Nothing is allocated later, so
a running group cannot run out of KV memory.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import GroupConfig, is_share
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.host.free_memory import host_free_bytes
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_host_blocks, choose_num_blocks, choose_num_snapshots
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBudget:
    """`pool` and `host` are uint8 [blocks, bytes_per_block]; `host` is None without a host tier.

    `num_snapshots`: slots for snapshots of states. They are a part of `kv_memory`; the runner allocates them.
    """

    layout: BlockLayout
    pool: Tensor
    host: Tensor | None
    num_snapshots: int = 0

    @classmethod
    def allocate(
        cls,
        config: GroupConfig,
        layout: BlockLayout,
        communicator: Communicator,
        device: torch.device,
        *,
        ranks_on_host: int,
        free_device_bytes: int,
        state_bytes: int = 0,
    ) -> Self:
        """Agree on the numbers of blocks with all ranks, and allocate them. All ranks call this together.

        `free_device_bytes`: of which `config.kv_memory` may be a share, without the states of running sequences.
        `state_bytes`: of the states of one sequence on this rank.

        Raises InvalidConfig if the configured memory is not free, or is too little for one request.
        """
        num_blocks, host_blocks, num_snapshots = choose_block_counts(
            config,
            layout,
            device_bytes=free_device_bytes,
            state_bytes=state_bytes,
            host_bytes=host_free_bytes(),
            on_cpu=device.type == "cpu",
            ranks_on_host=ranks_on_host,
        )
        num_blocks, host_blocks, num_snapshots = communicator.all_reduce_min([num_blocks, host_blocks, num_snapshots])
        pool = allocate_kv_pool(layout, num_blocks, device)
        host = allocate_host_pool(host_blocks, layout.bytes_per_block, device) if host_blocks else None
        return cls(layout, pool, host, num_snapshots)

    @property
    def num_blocks(self) -> int:
        return len(self.pool)

    @property
    def host_blocks(self) -> int:
        return 0 if self.host is None else len(self.host)

    @property
    def tokens(self) -> int:
        """Capacity of the device pool in tokens."""
        return self.num_blocks * self.layout.block_size


def check_weights_fit(
    config: GroupConfig, weight_bytes: int, free: int, device: torch.device, ranks_on_host: int
) -> None:
    """Raise InvalidConfig if the weights exceed `free`: the free bytes of a GPU, or of a host for all its ranks of this
    group. `weight_bytes`: what one rank holds at least. Without this check the kernel kills ranks while they load.
    """
    ranks, place, places = min(config.tp, ranks_on_host), "host or container", "hosts"
    if device.type == "cuda":
        ranks, place, places = 1, "GPU", "GPUs"
    if weight_bytes * ranks > free:
        raise InvalidConfig(
            f"the weights take at least {weight_bytes * ranks:,} bytes on this {place}, and {free:,} are free; use "
            "--quantization or a quantised checkpoint, a smaller model, a larger --tp over more "
            f"{places}, or more memory"
        )


def subtract_states(config: GroupConfig, free: int, state_bytes: int, ranks_on_host: int) -> int:
    """The bytes of `free` that the states leave. `state_bytes`: of one rank.

    A share of the free memory is divided by all ranks on the host, so the states of all of them are subtracted. Beside
    a `kv_memory` in bytes only those of this group's ranks are: if this group restarts beside others, these have
    allocated theirs already. Raises InvalidConfig if nothing is left.
    """
    ranks = ranks_on_host if is_share(config.kv_memory) else min(config.tp, ranks_on_host)
    left = free - state_bytes * ranks
    if state_bytes and left <= 0:
        others = "; if other groups already run on this host, set kv-memory in bytes" if ranks > config.tp else ""
        raise InvalidConfig(
            f"the states of {config.max_num_seqs} sequences take {state_bytes:,} bytes on each of {ranks} ranks, and "
            f"{free:,} are free; lower max-num-seqs{others}"
        )
    return left


def free_gpu_bytes(config: GroupConfig, *, in_use: int, total: int) -> int:
    """The bytes that `config.gpu_memory_utilization` of a GPU of `total` bytes leaves for the KV pool.

    `in_use`: by everything else, at the peak. Raises InvalidConfig if nothing is left.
    """
    share = config.gpu_memory_utilization
    free = int(share * total) - in_use
    if free <= 0:
        raise InvalidConfig(
            f"gpu-memory-utilization {share:g} allows {int(share * total):,} of the GPU's {total:,} bytes, and the "
            f"weights, the largest step, CUDA graphs and other programs take {in_use:,}; raise gpu-memory-utilization "
            "or tp, lower max-batch-tokens or max-num-seqs, or stop the other programs"
        )
    return free


def choose_block_counts(
    config: GroupConfig,
    layout: BlockLayout,
    *,
    device_bytes: int,
    host_bytes: int,
    on_cpu: bool,
    ranks_on_host: int,
    state_bytes: int = 0,
) -> tuple[int, int, int]:
    """(device blocks, host blocks, snapshots of states) of one rank, from the free bytes of its device and host.

    `state_bytes`: of the states of one sequence on this rank; 0 for a model without states.

    Shares of the free memory are divided by all ranks on the host. Bytes must be free for this group's ranks only: if
    this group restarts beside others, these have allocated their memory already. Raises InvalidConfig.
    """
    own_ranks, block = min(config.tp, ranks_on_host), layout.bytes_per_block
    sharing = ranks_on_host if is_share(config.kv_memory) else own_ranks
    num_snapshots = choose_num_snapshots(
        config.kv_memory,
        config.state_snapshot_share,
        free_bytes=device_bytes,
        sharing_ranks=sharing if on_cpu else 1,
        state_bytes=state_bytes,
        bytes_per_block=block,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
    )
    num_blocks = choose_num_blocks(
        config.kv_memory,
        free_bytes=device_bytes,
        sharing_ranks=sharing if on_cpu else 1,
        bytes_per_block=block,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        snapshot_bytes=num_snapshots * state_bytes,
        max_blocks=layout.max_blocks,
    )
    sharing = ranks_on_host if is_share(config.host_kv_memory) else own_ranks
    # On a CPU the pools of this host's ranks come out of the same memory as the host tier.
    left = host_bytes - (num_blocks * block * own_ranks if on_cpu else 0)
    other_pools = num_blocks * block * (sharing - own_ranks) if on_cpu else 0
    if not is_share(config.kv_memory) and other_pools >= left:
        other_pools = 0  # the other groups run already: `left` excludes their pools
    host_blocks = choose_host_blocks(
        config.host_kv_memory,
        free_bytes=left - other_pools,
        sharing_ranks=sharing,
        bytes_per_block=block,
    )
    return num_blocks, host_blocks, num_snapshots
