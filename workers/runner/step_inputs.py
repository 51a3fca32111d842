"""StepInputs: the tokens of a step and their places in the KV pool, gathered from the batch state.

The batch state has a row for each slot: token ids and block table. On a GPU the gathering is queued there, because the
newest token ids are only there. On a CPU numpy gathers, whose 15 small operations cost a step less than torch's
(bench/LOG.md, "What a decode step does outside the C kernels").
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.runner.host_transfer import upload


class StepInputs(NamedTuple):
    """T tokens of S sequences, flattened. The other fields are those of AttentionMetadata.

    token_ids, positions: int64 [T]. slots: int64 [S].
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor


def gather_inputs(
    rows: Sequence[ScheduledSequence], token_ids: Tensor, block_tables: Tensor, block_size: int, max_seq_len: int
) -> StepInputs:
    """`token_ids`, `block_tables`: of all slots. `max_seq_len`: the longest context of `rows`, with this step."""
    num_blocks = -(-max_seq_len // block_size)
    if token_ids.device.type == "cpu":
        return _gather_on_host(rows, token_ids, block_tables, block_size, num_blocks)
    return _gather_on_device(rows, token_ids, block_tables, block_size, num_blocks)


def _gather_on_host(
    rows: Sequence[ScheduledSequence], token_ids: Tensor, block_tables: Tensor, block_size: int, num_blocks: int
) -> StepInputs:
    tokens, tables = token_ids.numpy(), block_tables.numpy()
    slots, starts, counts = np.array([(row.slot, row.start, row.num_tokens) for row in rows]).T.copy()
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    counts.cumsum(out=cu_seqlens[1:])
    token_slots, positions = slots, starts
    if cu_seqlens[-1] > len(rows):
        row_of = np.arange(len(rows)).repeat(counts)
        token_slots = slots[row_of]
        positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[row_of]
    blocks = tables[token_slots, positions // block_size].astype(np.int64)
    arrays = (
        tokens[token_slots, positions].astype(np.int64),
        positions,
        slots,
        blocks * block_size + positions % block_size,
        tables[slots, :num_blocks],
        (starts + counts).astype(np.int32),
        cu_seqlens,
    )
    return StepInputs(*map(torch.from_numpy, arrays))


def _gather_on_device(
    rows: Sequence[ScheduledSequence], token_ids: Tensor, block_tables: Tensor, block_size: int, num_blocks: int
) -> StepInputs:
    device = token_ids.device
    cu_seqlens = list(accumulate((row.num_tokens for row in rows), initial=0))
    table = upload([(row.slot, row.start, row.num_tokens) for row in rows], torch.int64, device)
    slots, starts, counts = table.T
    token_slots, positions = slots, starts
    if cu_seqlens[-1] > len(rows):
        row_of = torch.arange(len(rows), device=device).repeat_interleave(counts, output_size=cu_seqlens[-1])
        token_slots = slots[row_of]
        first_token = upload(cu_seqlens[:-1], torch.int64, device)
        positions = torch.arange(cu_seqlens[-1], device=device) + (starts - first_token)[row_of]
    blocks = block_tables[token_slots, positions // block_size]
    return StepInputs(
        token_ids[token_slots, positions].long(),
        positions,
        slots,
        blocks.long() * block_size + positions % block_size,
        block_tables[slots, :num_blocks],
        (starts + counts).to(torch.int32),
        upload(cu_seqlens, torch.int32, device),
    )
