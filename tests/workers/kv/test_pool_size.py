"""The number of blocks, and the messages if none fits."""

import pytest

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_num_blocks
from coatcheck.workers.runner.memory_budget import choose_block_counts


@pytest.mark.parametrize(
    ("kv_memory", "free", "sharing", "blocks"),
    [
        (10_000.0, 100_000, 1, 10),
        (10_999.0, 100_000, 1, 10),
        (0.5, 100_000, 1, 50),
        (0.5, 100_000, 2, 25),
        (1.0, 100_000, 4, 25),
        (10_000.0, 20_000, 2, 10),
    ],
)
def test_bytes_are_per_rank_and_shares_are_shared(kv_memory: float, free: int, sharing: int, blocks: int) -> None:
    """Bytes are for each rank; a share of the free memory is divided among the ranks that share it."""
    found = choose_num_blocks(
        kv_memory, free_bytes=free, sharing_ranks=sharing, bytes_per_block=1000, block_size=16, max_model_len=None
    )
    assert found == blocks


def test_blocks_that_hold_nothing_are_limited() -> None:
    """A model without attention has blocks of 64 bytes, of which memory would hold more than rank 0 can count."""
    layout = BlockLayout.of((), 16, KvDtype.BFLOAT16)
    sizes = dict(sharing_ranks=1, bytes_per_block=layout.bytes_per_block, block_size=16, max_blocks=layout.max_blocks)
    assert choose_num_blocks(1e10, free_bytes=10**11, max_model_len=10**6, **sizes) == 1 << 18  # type: ignore[arg-type]
    assert choose_num_blocks(6400.0, free_bytes=10**11, max_model_len=None, **sizes) == 100  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kv_memory", "max_model_len", "message"),
    [
        (200_000.0, None, "100,000 are free; lower kv-memory"),
        (900.0, None, "one block of 16 tokens takes 1,000; raise kv-memory or lower block-size"),
        (0.001, None, "raise kv-memory"),
        (2_000.0, 33, "max-model-len 33 takes 3,000 bytes of KV a rank, and kv-memory gives 2,000"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(kv_memory: float, max_model_len: int | None, message: str) -> None:
    """A pool too large for the device, or too small for a block or max_model_len, is refused with what to change."""
    with pytest.raises(InvalidConfig) as refused:
        choose_num_blocks(
            kv_memory,
            free_bytes=100_000,
            sharing_ranks=1,
            bytes_per_block=1000,
            block_size=16,
            max_model_len=max_model_len,
        )
    assert message in str(refused.value)


def test_a_group_starts_again_beside_those_that_have_their_memory() -> None:
    """Bytes that another group of the host already holds are not asked for once more; more than is free for the group's
    own ranks is refused, and shares are divided by all."""
    layout = BlockLayout.of((LayerSpec(1, 1, 64),), 16, KvDtype.FLOAT32)
    gib, block = 1 << 30, layout.bytes_per_block

    def choose(free: int, **settings: float) -> tuple[int, ...]:
        config = GroupConfig("g", "m", "m", tp=2, **settings)  # type: ignore[arg-type]
        return choose_block_counts(config, layout, device_bytes=free, host_bytes=free, on_cpu=True, ranks_on_host=4)[:2]

    sizes = {"kv_memory": 1.0 * gib, "host_kv_memory": 2.0 * gib}
    assert choose(7 * gib, **sizes) == (gib // block, 2 * gib // block)  # the other group's 6 GiB are gone already
    with pytest.raises(InvalidConfig, match="host-kv-memory asks for 2,147,483,648 bytes for each of 2 ranks"):
        choose(5 * gib, **sizes)
    share = {"kv_memory": 1.0 * gib, "host_kv_memory": 0.5}
    assert choose(8 * gib, **share) == (gib // block, gib // 2 // block)  # nobody has anything yet
    assert choose(4 * gib, **share) == (gib // block, gib // 4 // block)  # the other group has its pools
    shares = choose(8 * gib, kv_memory=0.5, host_kv_memory=0.5)
    assert shares == (gib // block, gib // 2 // block)


def test_snapshots_take_their_share_of_the_pools_bytes() -> None:
    """Snapshots and blocks together fit in the bytes, and one sequence of max-model-len fits beside the snapshots."""
    layout = BlockLayout.of((LayerSpec(1, 1, 64),), 16, KvDtype.FLOAT32)
    block, state = layout.bytes_per_block, 1_000_000

    def choose(state: int = state, **settings: float) -> tuple[int, ...]:
        config = GroupConfig("g", "m", "m", **settings)  # type: ignore[arg-type]
        sizes = choose_block_counts(
            config, layout, device_bytes=10**9, host_bytes=10**9, on_cpu=True, ranks_on_host=2, state_bytes=state
        )
        return sizes[0], sizes[2]

    assert choose(kv_memory=0.2) == ((10**8 - 25 * state) // block, 25)
    assert choose(kv_memory=1e8, state_snapshot_share=0.5) == ((10**8 - 50 * state) // block, 50)
    assert choose(kv_memory=1e6, state_snapshot_share=0.9, state=100) == (120, 120)
    assert choose(kv_memory=1e8, state_snapshot_share=0.0) == (10**8 // block, 0)
    assert choose(kv_memory=1e6) == (10**6 // block, 0)
    most = int(10**8 // block * 16 - 3 * state // block * 16)
    num_blocks, num_snapshots = choose(kv_memory=1e8, max_model_len=most)
    assert num_snapshots in (2, 3) and num_blocks * 16 >= most
