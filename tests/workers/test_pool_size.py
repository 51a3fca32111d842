"""How many blocks fit, and what an operator reads when none does."""

import pytest

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.pool_size import choose_num_blocks


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
    """Bytes are what one rank takes; a share of the free memory is divided among those who share it."""
    found = choose_num_blocks(
        kv_memory, free_bytes=free, sharing_ranks=sharing, bytes_per_block=1000, block_size=16, max_model_len=None
    )
    assert found == blocks


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
    """Too large for the device, too small for a block or for the length asked for: the message says what to change."""
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
