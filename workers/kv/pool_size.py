"""Sizes of a rank's KV pool, host pool and snapshots of states, from bytes or a share of the free memory.

Every rank computes its own numbers, and the group uses the smallest.
"""

import sys

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import is_share


def choose_num_blocks(
    kv_memory: float,
    *,
    free_bytes: int,
    sharing_ranks: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int | None,
    snapshot_bytes: int = 0,
    max_blocks: int = sys.maxsize,
) -> int:
    """The number of blocks of this rank's KV pool.

    `kv_memory`: bytes for this rank, or a share of `free_bytes` that `sharing_ranks` ranks divide (see `is_share`).
    `max_model_len`: the operator's setting, or None. `snapshot_bytes`: the part of `kv_memory` that snapshots of states
    take (see `choose_num_snapshots`). `max_blocks`: see BlockLayout.
    Raises InvalidConfig if the pools of the sharing ranks exceed `free_bytes`, or if the pool cannot hold one block or
    a sequence of `max_model_len` tokens.
    """
    pool_bytes = _pool_bytes(kv_memory, free_bytes, sharing_ranks)
    if pool_bytes * sharing_ranks > free_bytes:
        raise InvalidConfig(
            f"kv-memory asks for {pool_bytes:,} bytes for each of {sharing_ranks} ranks on this device, and "
            f"{free_bytes:,} are free; lower kv-memory"
        )
    num_blocks = min((pool_bytes - snapshot_bytes) // bytes_per_block, max_blocks)
    if num_blocks < 1:
        raise InvalidConfig(
            f"kv-memory gives {pool_bytes:,} bytes a rank, and one block of {block_size} tokens takes "
            f"{bytes_per_block:,}; raise kv-memory or lower block-size"
        )
    if max_model_len is not None and num_blocks * block_size < max_model_len:
        needed = -(-max_model_len // block_size) * bytes_per_block
        raise InvalidConfig(
            f"max-model-len {max_model_len} takes {needed:,} bytes of KV a rank, and kv-memory gives {pool_bytes:,}; "
            "raise kv-memory or lower max-model-len"
        )
    return num_blocks


def choose_num_snapshots(
    kv_memory: float,
    share: float,
    *,
    free_bytes: int,
    sharing_ranks: int,
    state_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int | None,
) -> int:
    """The number of snapshots of states, of `state_bytes` each, that fit into `share` of `kv_memory`; 0 without states.

    Fewer, perhaps 0, so that the remaining bytes hold at least one block, a sequence of `max_model_len`, and as many
    blocks as there are snapshots. The other parameters are those of `choose_num_blocks`.
    """
    if not state_bytes:
        return 0
    pool_bytes = _pool_bytes(kv_memory, free_bytes, sharing_ranks)
    needed = max(-(-(max_model_len or 0) // block_size), 1) * bytes_per_block
    wanted = min(int(share * pool_bytes), pool_bytes - needed) // state_bytes
    return max(min(wanted, pool_bytes // (bytes_per_block + state_bytes)), 0)


def choose_host_blocks(host_kv_memory: float, *, free_bytes: int, sharing_ranks: int, bytes_per_block: int) -> int:
    """The number of blocks of this rank's host pool.

    `host_kv_memory`: as `kv_memory` of `choose_num_blocks`; 0 for no host tier. Raises InvalidConfig if the host pools
    of the sharing ranks exceed `free_bytes`, or if the pool cannot hold one block.
    """
    if not host_kv_memory:
        return 0
    host_bytes = int(host_kv_memory * free_bytes / sharing_ranks if is_share(host_kv_memory) else host_kv_memory)
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


def _pool_bytes(kv_memory: float, free_bytes: int, sharing_ranks: int) -> int:
    return int(kv_memory * free_bytes / sharing_ranks if is_share(kv_memory) else kv_memory)
