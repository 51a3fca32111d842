"""The input of a step, gathered from the batch state: token ids, positions, slots in the KV pool and block tables.

On a CPU the C library makes all tensors of a step in one call. The same operations in torch took 0.3 ms of a traced
decode step (bench/LOG.md, "What a decode step does outside the C kernels, once more").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_rows, check_shape, once_per_geometry


class StepInput(NamedTuple):
    """T tokens of R rows; row r owns tokens cu_seqlens[r] to cu_seqlens[r + 1].

    input_ids, positions: int64 [T]
    slot_mapping:         int64 [T], block * block_size + offset of each token
    block_tables:         int32 [R, blocks], with the blocks of the longest row
    seq_lens:             int32 [R], with this step's tokens
    cu_seqlens:           int32 [R + 1]
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor


def gather_rows(
    spans: Tensor, token_ids: Tensor, block_tables: Tensor, *, block_size: int, num_tokens: int, max_seq_len: int
) -> StepInput:
    """The input of a step that computes `spans`.

    spans:        int64 [R, 3], contiguous: slot, first position and number of tokens of each row
    token_ids:    int32 [slots, positions]
    block_tables: int32 [slots, blocks]
    num_tokens:   the sum of the rows' numbers of tokens
    max_seq_len:  the largest first position + number of tokens

    Raises LaunchRefused. Slots and positions are not checked against the shapes.
    """
    _check(spans, token_ids, block_tables)
    library, num_blocks = native.library_for(spans), -(-max_seq_len // block_size)
    if library is None:
        return gather_rows_reference(spans, token_ids, block_tables, block_size, num_tokens, num_blocks)
    count = len(spans)
    long = torch.empty(3, num_tokens, dtype=torch.int64)
    tables = torch.empty(count, num_blocks, dtype=torch.int32)
    lens = torch.empty(2 * count + 1, dtype=torch.int32)
    at, size, lens_at = long.data_ptr(), num_tokens * 8, lens.data_ptr()
    library.gather_rows(
        native.STEP_ROWS.pack(
            spans.data_ptr(), count, token_ids.data_ptr(), token_ids.stride(0),
            block_tables.data_ptr(), block_tables.stride(0), block_size, num_blocks,
            at, at + size, at + 2 * size, tables.data_ptr(), lens_at, lens_at + 4 * count,
        )
    )  # fmt: skip
    input_ids, positions, slot_mapping = long.unbind()
    return StepInput(input_ids, positions, slot_mapping, tables, lens[:count], lens[count:])


def gather_rows_reference(
    spans: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int, num_tokens: int, num_blocks: int
) -> StepInput:
    """As `gather_rows`, in torch, on any device. `num_blocks`: the width of the step's tables."""
    slots, starts, counts = spans.T
    ends = counts.cumsum(0)
    if num_tokens == len(spans):
        token_slots, positions = slots, starts.contiguous()
    else:
        row_of = torch.arange(len(spans), device=spans.device).repeat_interleave(counts, output_size=num_tokens)
        token_slots = slots[row_of]
        positions = torch.arange(num_tokens, device=spans.device) + (starts - (ends - counts))[row_of]
    blocks = block_tables[token_slots, positions // block_size]
    return StepInput(
        input_ids=token_ids[token_slots, positions].long(),
        positions=positions,
        slot_mapping=blocks.long() * block_size + positions % block_size,
        block_tables=block_tables[slots, :num_blocks],
        seq_lens=(starts + counts).to(torch.int32),
        cu_seqlens=F.pad(ends, (1, 0)).to(torch.int32),
    )


@once_per_geometry
def _check(spans: Tensor, token_ids: Tensor, block_tables: Tensor) -> None:
    check_dense("spans", spans, (None, 3), torch.int64, spans.device)
    for name, table in (("token_ids", token_ids), ("block_tables", block_tables)):
        check_shape(name, table, (None, None))
        check_rows(name, table)
        check_dtype(name, table, torch.int32)
