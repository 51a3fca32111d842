"""The launch parameters that are chosen for any shape and GPU: pure arithmetic."""

from __future__ import annotations

import pytest

from coatcheck.kernels.attention.latent_tiles import pick_latent_tiles
from coatcheck.kernels.attention.tile_launch import TileLaunch, pick_tiles
from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_89, SM_90, SM_120, GpuProperties
from coatcheck.kernels.layers import grouped_gemm, invariant_linear
from coatcheck.kernels.linear_attention import mamba2_chunks, mamba2_recurrence
from coatcheck.kernels.linear_attention.chunks import MIN_CHUNKED
from tests.examples import pairwise


@pairwise(
    ("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942]),
    ("element_size", [2, 4]),
    ("dim", [16, 64, 80, 96, 128, 256]),
    ("heads, kv_heads", [(8, 8), (8, 2), (71, 1), (24, 1)]),
)
def test_tiles_fit_the_shape_and_the_processor(
    dim: int, element_size: int, gpu: GpuProperties, heads: int, kv_heads: int
) -> None:
    """Tiles are powers of two that `tl.dot` takes, cover a row, hold whole queries, and fit the shared memory."""
    for width, pool_bits in ((dim, 8 * element_size), (dim, 8), (dim // 2, 4)):
        for batch_invariant in (False, True):
            tiles = pick_tiles(
                heads, kv_heads, dim, element_size=element_size, pool_bits=pool_bits, gpu=gpu,
                batch_invariant=batch_invariant,
            )  # fmt: skip
            assert len(set(tiles[:3])) == 1 or not batch_invariant
            assert tiles.short.block_m <= tiles.medium.block_m <= tiles.wide.block_m or heads > 64
            for tile in tiles[:3]:
                assert heads // kv_heads % tile.pack == 0 and tile.shape.queries >= 1
                assert tile.shape.queries * tile.pack <= tile.block_m and tile.shape.head_tiles * tile.pack == heads
                bits = pool_bits if tile is tiles.short and not batch_invariant else 8 * element_size
                check(tile, width, max(1, bits // 8), gpu)


def check(launch: TileLaunch, width: int, element_size: int, gpu: GpuProperties) -> None:
    for size in launch[:3]:
        assert size >= 16 and size & (size - 1) == 0
    assert launch.block_d >= width
    # The number of a block takes stages beside the rows that it leads to.
    staged = (launch.num_stages + 1) // 2 * 2 * launch.block_n * launch.block_d * element_size
    assert launch.num_stages == 1 or staged <= gpu.shared


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_of_latents_fit_the_processor(element_size: int, gpu: GpuProperties) -> None:
    """Tiles of DeepSeek's latents hold whole queries, or a part of the heads of one, and fit shared memory."""
    for heads in (128, 16, 5, 1):
        for pool_bits in (8 * element_size, 8, 4):
            for batch_invariant in (False, True):
                tiles = pick_latent_tiles(
                    heads, 512, element_size=element_size, pool_bits=pool_bits, gpu=gpu, batch_invariant=batch_invariant
                )
                assert len(set(tiles[:3])) == 1 or not batch_invariant
                for tile in tiles[:3]:
                    assert tile.shape.queries * tile.pack <= tile.block_m and tile.shape.head_tiles * tile.pack == heads
                    rows = tile.block_n * (2 if tile.num_stages == 5 else 1)
                    rows += 0 if gpu is GFX942 else tile.block_m  # AMD's compiler keeps queries in registers
                    assert rows * 576 * element_size <= gpu.shared


def test_long_chunks_take_large_tiles_where_the_processor_has_room() -> None:
    """128 rows in a tile from bfloat16 on every GPU; from a quantised pool only where registers suffice."""
    tiles = [
        pick_tiles(32, 8, 128, element_size=2, pool_bits=bits, gpu=gpu).wide.block_m
        for gpu in (SM_80, SM_90)
        for bits in (16, 8)
    ]
    assert tiles == [128, 64, 128, 128]


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
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


def test_a_decode_reads_its_keys_once() -> None:
    """All heads of a KV head are rows of one short tile, so that its keys are read by one program."""
    for heads, kv_heads, rows in ((32, 8, 16), (32, 32, 16), (16, 1, 16), (32, 1, 32), (71, 1, 128)):
        short = pick_tiles(heads, kv_heads, 128, element_size=2, pool_bits=16, gpu=SM_90).short
        assert (short.block_m, short.shape.head_tiles) == (rows, kv_heads)


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
@pytest.mark.parametrize("element_size", [2, 4])
def test_a_fixed_order_depends_on_the_weight_alone(element_size: int, gpu: GpuProperties) -> None:
    """Units cover the depth and fill the processor with one row of tiles; tiles and the sums of units have bounds."""
    launch = invariant_linear.pick_launch(element_size, gpu)
    stage = (launch.block_m + launch.block_n) * launch.block_k * element_size
    assert launch.num_stages >= 1 and stage * launch.num_stages <= gpu.shared
    for features, depth in ((4096, 14336), (1280, 8192), (28672, 4096), (256, 300), (1, 70000)):
        units, columns = invariant_linear.units_of(1, features, depth, launch, gpu)
        assert columns % launch.block_k == 0 and (units - 1) * columns < depth <= units * columns
        wide = -(-features // launch.block_n)
        assert units == 1 or (units * wide <= gpu.processors and columns >= invariant_linear._LEAST_UNIT)
        split = [invariant_linear.is_split(rows, 1, features, units, launch, gpu) for rows in (1, 512, 513)]
        assert split == [units > 1, units > 1 and wide * -(-512 // launch.block_m) < gpu.processors, False]


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_120, GFX942])
@pytest.mark.parametrize("state_size", [16, 64, 128, 256])
def test_programs_of_mamba2_fit_the_registers(state_size: int, gpu: GpuProperties) -> None:
    """Blocks are powers of two that cover a head, `tl.dot` takes them, and a thread has few elements of the state."""
    for head_dim in (4, 16, 24, 64, 80, 128):
        step = mamba2_recurrence.pick_recurrence(head_dim, state_size)
        scan = mamba2_chunks.pick_scan(head_dim, state_size, gpu)
        for size in (step.block, scan.chunk, scan.columns):
            assert size & (size - 1) == 0
        assert step.block * state_size <= 32 * 32 * step.num_warps
        assert scan.columns * state_size <= 64 * 32 * scan.scan_warps
        assert scan.columns >= 16 and scan.chunk >= MIN_CHUNKED and step.block <= scan.columns
    for norm_size in (0, 16, 512, 1280, 8192, 16384):
        gate = mamba2_recurrence.pick_gate(norm_size)
        assert gate.block >= gate.size >= norm_size and gate.block <= 32 * 32 * gate.num_warps
