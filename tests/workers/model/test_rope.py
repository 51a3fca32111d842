"""The table of cos and sin by position, and frequencies that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coatcheck.workers.model import rope
from coatcheck.workers.model.meta_model import build_meta_model
from tests.workers.model.architectures import shape_of


def cos_and_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * torch.logspace(0, -4, 8)
    return angles.cos(), angles.sin()


def test_rows_of_the_table_are_those_that_would_be_computed() -> None:
    """In any order, before and after the table has grown, and beyond the positions that it holds."""
    computed: list[int] = []

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        computed.append(len(positions))
        return cos_and_sin(positions)

    table = rope.CosSinTable(compute)
    last = rope._TABLE_POSITIONS
    for positions in ([0], [5, 3, 3], [2047], [2048], [7000, 1], [last - 1], [last], [last + 9, 2]):
        at = torch.tensor(positions)
        for ours, theirs in zip(table.rows(at, max(positions) + 1), cos_and_sin(at), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert computed == [2048, 4096, 8192, last, 1, 2]


def test_phimoe_rotates_a_token_alike_beside_later_positions() -> None:
    """transformers scales cos and sin by the largest position of the batch; a served model by its longest context."""
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8, short_mscale=1.25, long_mscale=1.5)
    parameters = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32) | factors
    config = shape_of("phimoe", num_local_experts=4, rope_parameters=parameters)
    for length, scale in ((32, 1.25), (256, 1.5)):
        rotary: Any = build_meta_model(config, torch.float32, torch.device("cpu"), length).base_model.rotary_emb
        x = torch.zeros(1)
        alone, beside = rotary(x, torch.tensor([[3]])), rotary(x, position_ids=torch.tensor([[3, 200]]))
        for one, both in zip(alone, beside, strict=True):
            assert torch.equal(one[0, 0], both[0, 0])
        first = rotary(x, torch.tensor([[0]]))
        assert torch.equal(first[0][0, 0], torch.full((16,), scale)) and not first[1].any()
        assert float(alone[0][0, 0, 0]) == torch.tensor(3.0).cos().mul(scale)
