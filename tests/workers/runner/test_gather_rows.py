"""The input of a step that the C library gathers equals what torch gathers."""

import random

import pytest
import torch

from coatcheck.kernels import native
from coatcheck.kernels.kv.gather_rows import gather_rows, gather_rows_reference
from coatcheck.kernels.launch_check import LaunchRefused

SLOTS, POSITIONS, BLOCK = 6, 100, 8


def _state() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and block tables of a batch state, which are views of larger tensors."""
    token_ids = torch.randint(0, 1000, (SLOTS + 1, POSITIONS + 1), dtype=torch.int32)
    block_tables = torch.randint(0, 500, (SLOTS, 20), dtype=torch.int32)[:, :13]
    return token_ids, block_tables


@pytest.mark.skipif(native.library() is None, reason="needs the C library")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("decodes_only", [True, False])
def test_the_library_gathers_what_torch_gathers(seed: int, decodes_only: bool) -> None:
    """Decodes, chunks of prompts and rows of one slot twice give equal tensors with equal dtypes."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    token_ids, block_tables = _state()
    rows = []
    for _ in range(chance.randint(1, 8)):
        start = chance.randrange(POSITIONS - 1)
        count = 1 if decodes_only else chance.randint(1, POSITIONS - start)
        rows.append((chance.randrange(SLOTS), start, count))
    spans = torch.tensor(rows)
    num_tokens, max_seq_len = sum(row[2] for row in rows), max(row[1] + row[2] for row in rows)
    ours = gather_rows(spans, token_ids, block_tables, block_size=BLOCK, num_tokens=num_tokens, max_seq_len=max_seq_len)
    want = gather_rows_reference(spans, token_ids, block_tables, BLOCK, num_tokens, -(-max_seq_len // BLOCK))
    for name, mine, theirs in zip(want._fields, ours, want, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


def test_tensors_of_other_shapes_and_dtypes_are_refused() -> None:
    """The error names the tensor, and nothing is read from it."""
    token_ids, block_tables = _state()
    spans = torch.tensor([[0, 3, 1]])
    for name, given in (
        ("spans", (spans.int(), token_ids, block_tables)),
        ("spans", (spans[:, :2], token_ids, block_tables)),
        ("token_ids", (spans, token_ids.long(), block_tables)),
        ("block_tables", (spans, token_ids, block_tables[0])),
    ):
        with pytest.raises(LaunchRefused, match=f"^{name}: expected"):
            gather_rows(*given, block_size=BLOCK, num_tokens=1, max_seq_len=4)
