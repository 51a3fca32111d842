"""The tiles of a step's rows with adapters, and the launch of the kernels that read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_89, SM_90, SM_120, GpuProperties
from coatcheck.kernels.launch_check import LaunchRefused
from coatcheck.kernels.lora.lora_linear import LoraPart
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.kernels.lora.lora_tiles import BLOCK_M, num_ints, num_tiles, pack_tiles, view_tiles
from coatcheck.kernels.lora.shrink_expand import StackedLora, pick_launch


@given(st.lists(st.integers(0, 5), min_size=1, max_size=90), st.integers(5, 7))
def test_every_row_with_an_adapter_is_in_one_tile_of_that_adapter(adapters: list[int], count: int) -> None:
    """No tile has another row, and the room for tiles depends on the numbers of rows and adapters alone."""
    packed = pack_tiles(np.array(adapters, np.int32), count)
    assert packed.dtype == np.int32 and len(packed) == num_ints(len(adapters), count)
    order, tiles = view_tiles(torch.from_numpy(packed), len(adapters))
    assert len(tiles) == num_tiles(len(adapters), count)
    found = {}
    for adapter, first, end in tiles.tolist():
        if adapter >= 0:
            assert 0 < end - first <= BLOCK_M
            for row in order[first:end].tolist():
                assert row not in found
                found[row] = adapter + 1
    assert found == {row: adapter for row, adapter in enumerate(adapters) if adapter}


@pytest.mark.parametrize("rows", [1, 5, 16, 90])
def test_each_row_may_have_another_adapter(rows: int) -> None:
    """The most tiles of all choices fit: as many adapters as rows, and full tiles beside such ones."""
    many = np.arange(1, rows + 1, dtype=np.int32)
    assert (view_tiles(torch.from_numpy(pack_tiles(many, rows)), rows).tiles[:, 0] >= 0).sum() == rows
    few = np.array([1 + row % 3 for row in range(rows)], np.int32)
    assert len(pack_tiles(few, 3)) == num_ints(rows, 3)


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
@pytest.mark.parametrize("element_size", [2, 4])
def test_launches_fit_the_processor(gpu: GpuProperties, element_size: int) -> None:
    """Blocks are powers of two that `tl.dot` takes, fit shared memory, and units cover the columns."""
    for depth, width, rank in ((4096, 48, 16), (14336, 768, 256), (90, 16, 1), (1200, 16, 16)):
        launch = pick_launch(depth, width, rank, element_size, gpu)
        for size in (launch.block_r, launch.rank, launch.block_k):
            assert 16 <= size <= 128 and size & (size - 1) == 0
        assert launch.columns % launch.block_k == 0
        assert (launch.units - 1) * launch.columns < depth <= launch.units * launch.columns
        stage = (BLOCK_M + launch.block_r) * launch.block_k * element_size
        assert launch.num_stages >= 1 and launch.num_stages * stage <= gpu.shared


def test_parts_that_do_not_fit_the_linear() -> None:
    """They are refused before a kernel reads or writes out of bounds."""
    step, shape, cpu = LoraStep(), (400, 96), torch.device("cpu")
    for part, dtype in (
        (LoraPart(torch.randn(4, 5), torch.randn(4, 8)), torch.float32),
        (LoraPart(torch.randn(4, 96), torch.randn(4, 92), 309), torch.float32),
        (LoraPart(torch.randn(4, 96), torch.randn(5, 8)), torch.float32),
        (LoraPart(torch.randn(4, 96), torch.randn(4, 8)), torch.bfloat16),
        (LoraPart(torch.randn(4, 96).double(), torch.randn(4, 8).double()), torch.float64),
    ):
        with pytest.raises(LaunchRefused):
            StackedLora(step, [[part]], shape, dtype, cpu)
