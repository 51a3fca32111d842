"""The number of host blocks, the allocation of host memory, and the views of the pool."""

import pytest
import torch

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_host_blocks
from coatcheck.workers.runner.kv_memory import allocate_host_pool, allocate_kv_pool, make_layer_caches
from coatcheck.workers.runner.memory_budget import free_gpu_bytes


@pytest.mark.parametrize(
    ("host_kv_memory", "sharing", "blocks"), [(0.0, 2, 0), (5_500.0, 2, 5), (0.5, 1, 50), (0.5, 4, 12), (1.0, 1, 100)]
)
def test_bytes_are_per_rank_and_shares_are_shared(host_kv_memory: float, sharing: int, blocks: int) -> None:
    """Above 1 the value is bytes per rank, up to 1 a share that the ranks of the host divide; 0 is no host tier."""
    assert choose_host_blocks(host_kv_memory, free_bytes=100_000, sharing_ranks=sharing, bytes_per_block=1000) == blocks


@pytest.mark.parametrize(
    ("host_kv_memory", "free", "message"),
    [
        (60_000.0, 100_000, "100,000 are free beside the KV pools; lower host-kv-memory"),
        (5_000.0, -10, "0 are free beside the KV pools; lower host-kv-memory"),
        (999.0, 100_000, "one block takes 1,000; raise host-kv-memory, or set it to 0"),
        (0.001, 100_000, "raise host-kv-memory"),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused(host_kv_memory: float, free: int, message: str) -> None:
    """More bytes than are free, or less than one block, raises InvalidConfig with what to change."""
    with pytest.raises(InvalidConfig, match=message):
        choose_host_blocks(host_kv_memory, free_bytes=free, sharing_ranks=2, bytes_per_block=1000)


def test_what_a_share_of_the_gpu_leaves() -> None:
    """The pool gets the share without what is in use. If nothing is left, the error says what to change."""
    config = GroupConfig("g", "m", "m", gpu_memory_utilization=0.9)
    assert free_gpu_bytes(config, in_use=300, total=1000) == 600
    with pytest.raises(InvalidConfig, match=r"utilization 0\.9 allows 900 of the GPU's 1,000 bytes.* take 900; raise"):
        free_gpu_bytes(config, in_use=900, total=1000)


def test_host_memory_is_zeroed_rows() -> None:
    """Host memory has one row of zeros per block."""
    memory = allocate_host_pool(3, 128, torch.device("cpu"))
    assert memory.shape == (3, 128) and memory.dtype == torch.uint8 and not memory.any()


def test_memory_that_the_system_refuses() -> None:
    """A pool that this process cannot have, as with a small `ulimit -v`, is an error with the setting and the bytes."""
    layout, cpu = BlockLayout.of([LayerSpec(4, 2, 16)], 4, KvDtype.BFLOAT16), torch.device("cpu")
    for num_blocks in (1 << 44, 1 << 60):
        size = num_blocks * layout.bytes_per_block
        with pytest.raises(InvalidConfig, match=f"^kv-memory: the system refuses {size:,} bytes"):
            allocate_kv_pool(layout, num_blocks, cpu)
    with pytest.raises(InvalidConfig, match="^host-kv-memory: the system refuses 1,152,921,504,606,846,976 bytes"):
        allocate_host_pool(1 << 50, 1024, cpu)


@pytest.mark.parametrize("value_dim", [0, 8])
def test_values_of_another_size_than_keys_are_refused(value_dim: int) -> None:
    """A layer whose values are smaller than its keys raises ValueError: V's view would reach into the next part."""
    layout = BlockLayout.of([LayerSpec(4, 2, 16, v_head_dim=value_dim)], 4, KvDtype.BFLOAT16)
    with pytest.raises(ValueError, match=f"value_dim is {value_dim} and head_dim 16; they must be equal"):
        make_layer_caches(layout, allocate_kv_pool(layout, 3, torch.device("cpu")))
