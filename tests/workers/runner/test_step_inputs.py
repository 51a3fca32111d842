"""The tokens of a step and their places, gathered from the batch state."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.workers.core.step_plan import ScheduledSequence
from coatcheck.workers.runner import step_inputs

_SLOTS, _LENGTH, _BLOCK = 5, 40, 7

rows_of_a_step = st.lists(
    st.builds(
        ScheduledSequence,
        slot=st.integers(0, _SLOTS - 1),
        start=st.integers(0, _LENGTH - 9),
        num_tokens=st.integers(1, 8),
        needs_sample=st.booleans(),
    ),
    min_size=1,
    max_size=_SLOTS,
    unique_by=lambda row: row.slot,
)


@given(rows_of_a_step)
def test_a_host_gathers_what_a_device_gathers(rows: list[ScheduledSequence]) -> None:
    """Each token has its id, its position and its place in the pool, and each sequence its blocks and its length, by
    numpy as by torch, in the same dtypes."""
    token_ids = torch.randint(0, 999, (_SLOTS + 1, _LENGTH + 1), dtype=torch.int32)
    tables = torch.randint(0, 99, (_SLOTS, -(-_LENGTH // _BLOCK)), dtype=torch.int32)
    num_blocks = -(-max(row.start + row.num_tokens for row in rows) // _BLOCK)
    arguments = (rows, token_ids, tables, _BLOCK, num_blocks)
    on_host, on_device = step_inputs._gather_on_host(*arguments), step_inputs._gather_on_device(*arguments)
    for name, ours, theirs in zip(on_host._fields, on_host, on_device, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
        assert name == "block_tables" or ours.is_contiguous(), name
    places = [(row.slot, position) for row in rows for position in range(row.start, row.start + row.num_tokens)]
    assert on_host.token_ids.tolist() == [int(token_ids[place]) for place in places]
    blocks = [int(tables[slot, position // _BLOCK]) for slot, position in places]
    offsets = [position % _BLOCK for _, position in places]
    assert on_host.slot_mapping.tolist() == [b * _BLOCK + o for b, o in zip(blocks, offsets, strict=True)]
