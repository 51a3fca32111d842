"""The launch parameters that are chosen for any shape and GPU: pure arithmetic."""

from __future__ import annotations

import pytest

from coatcheck.kernels.attention import paged_decode, paged_prefill
from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_89, SM_90, SM_120, GpuProperties
from coatcheck.kernels.layers import grouped_gemm


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_tiles_fit_the_shape_and_the_processor(dim: int, element_size: int, gpu: GpuProperties) -> None:
    """Tiles are powers of two that `tl.dot` takes, cover a row, and are staged no deeper than shared memory is."""
    for width, pool_bits in ((dim, 8 * element_size), (dim, 8), (dim // 2, 4)):
        quantised, pool_size = pool_bits <= 8, max(1, pool_bits // 8)
        for longest in (2, 17, 4096):
            prefill = paged_prefill.pick_launch(longest, dim, width, element_size, quantised, gpu)
            assert prefill.block_m >= min(longest, 16) and prefill.block_m < 2 * max(16, longest)
            check(prefill, width, element_size, gpu)
        for group in (1, 4, 32):
            decode = paged_decode.pick_launch(group, width, element_size, pool_bits, gpu)
            assert decode.block_m >= group
            check(decode, width, pool_size, gpu)


def check(
    launch: paged_prefill.PrefillLaunch | paged_decode.DecodeLaunch, width: int, element_size: int, gpu: GpuProperties
) -> None:
    for size in launch[:3]:
        assert size >= 16 and size & (size - 1) == 0
    assert launch.block_d >= width
    # The number of a block takes stages beside the rows that it leads to.
    staged = (launch.num_stages + 1) // 2 * 2 * launch.block_n * launch.block_d * element_size
    assert launch.num_stages == 1 or staged <= gpu.shared


def test_long_chunks_take_large_tiles_where_the_processor_has_room() -> None:
    """128 queries in a tile from bfloat16 on every GPU; from a quantised pool only where registers suffice."""
    tiles = [
        paged_prefill.pick_launch(4096, 128, 128, 2, quantised, gpu).block_m
        for gpu in (SM_80, SM_90)
        for quantised in (False, True)
    ]
    assert tiles == [128, 64, 128, 128]


@pytest.mark.parametrize("gpu", [SM_80, SM_90, GFX942, ADA])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_of_experts_fit_the_processor(element_size: int, gpu: GpuProperties) -> None:
    """Tiles grow with the rows of an expert, unless results may not depend on the batch, and fit shared memory."""
    heights = []
    for batch_invariant in (False, True):
        for tokens in (1, 8192):
            launch = grouped_gemm.pick_launch(tokens * 8, 128, element_size, gpu, batch_invariant=batch_invariant)
            stage = (launch.block_m + 2 * launch.block_n) * launch.block_k * element_size
            assert launch.block_m >= 16 and launch.num_stages >= 1 and stage * launch.num_stages <= gpu.shared
            heights.append(launch.block_m)
    assert heights[1] > heights[0] == heights[2] == heights[3]
