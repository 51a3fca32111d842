"""Byte offsets of keys, values and scales in a block: no overlap, little padding."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import KV_DTYPES, KvDtype, choose_kv_dtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.kv.block_layout import BlockLayout
from tests.examples import pairwise

EVEN = st.integers(1, 40).map(lambda n: 2 * n)
LAYER = st.builds(LayerSpec, st.just(8), st.integers(1, 9), EVEN, v_head_dim=st.none() | st.just(0) | EVEN)
LAYERS = st.lists(LAYER, min_size=1, max_size=5)


@given(LAYERS, st.sampled_from([4, 8, 16, 128]), st.sampled_from(KvDtype))
def test_parts_of_a_block_are_apart_and_fill_it(layers: list[LayerSpec], block_size: int, kv_dtype: KvDtype) -> None:
    """The parts of a layer do not overlap, elements start on cache lines, and all other bytes are padding."""
    layout = BlockLayout.of(layers, block_size, kv_dtype)
    parts = []
    for layer, offsets in zip(layers, layout.layers, strict=True):
        rows = layer.num_kv_heads * block_size
        stored = [
            (offsets.k, offsets.k_scales, layer.head_dim),
            (offsets.v, offsets.v_scales, layer.value_dim),
        ]
        for offset, scales_offset, dim in stored if layer.value_dim else stored[:1]:
            assert offset % 64 == 0
            parts.append((offset, offset + rows * dim * kv_dtype.bits // 8))
            if kv_dtype.is_quantised:
                assert scales_offset % 16 == 0
                parts.append((scales_offset, scales_offset + rows * 2))
    parts.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(parts))
    assert parts[-1][1] <= layout.bytes_per_block
    assert layout.bytes_per_block - sum(end - start for start, end in parts) < 64 * (len(parts) + 1)


@pairwise(
    ("name, at_least", [("fp8", 1.9), ("int8", 1.9), ("int4", 3.5)]),
    ("head_dim", [64, 80, 96, 128, 256]),
    ("kv_heads", [1, 2, 8]),
    ("block_size", [8, 16, 128]),
)
def test_quantised_pools_hold_more(name: str, at_least: float, head_dim: int, kv_heads: int, block_size: int) -> None:
    """fp8 and int8 give at least 1.9 times as many blocks from the same bytes, int4 3.5 times."""
    layers = [LayerSpec(8, kv_heads, head_dim)] * 2
    plain = BlockLayout.of(layers, block_size, KvDtype.BFLOAT16)
    assert plain.bytes_per_block / BlockLayout.of(layers, block_size, KV_DTYPES[name]).bytes_per_block >= at_least


def test_a_bfloat16_block_is_what_arithmetic_says() -> None:
    """32 layers of 8 heads of 128 in bfloat16 take 131,072 bytes a token."""
    assert BlockLayout.of([LayerSpec(32, 8, 128)] * 32, 16, KvDtype.BFLOAT16).bytes_per_token == 131_072


@pytest.mark.parametrize(
    ("kv_dtype", "elements", "scales"), [(KvDtype.BFLOAT16, 1152, 0), (KvDtype.FP8, 576, 4), (KvDtype.INT4, 288, 4)]
)
def test_a_latent_cache_holds_two_rows_a_token(kv_dtype: KvDtype, elements: int, scales: int) -> None:
    """With latent attention a layer stores the latent and the rotary key of all heads, each with a scale."""
    layout = BlockLayout.of([LayerSpec(128, 1, 512 + 64, v_head_dim=0, rope_head_dim=64)] * 61, 64, kv_dtype)
    assert (layout.bytes_per_token, layout.scale_bytes_per_token) == (61 * (elements + scales), 61 * scales)


@pytest.mark.parametrize("kv_dtype", [KvDtype.BFLOAT16, KvDtype.INT8])
def test_layers_that_read_an_earlier_layer_take_no_room(kv_dtype: KvDtype) -> None:
    """They have the offsets of the layer whose keys and values they read."""
    own = [LayerSpec(8, 2, 64, sliding_window=16), LayerSpec(8, 1, 128)]
    readers = [replace(own[1], kv_source=1), replace(own[0], kv_source=0)]
    layout, alone = BlockLayout.of([*own, *readers], 16, kv_dtype), BlockLayout.of(own, 16, kv_dtype)
    assert (layout.bytes_per_block, layout.scale_bytes_per_token) == (
        alone.bytes_per_block,
        alone.scale_bytes_per_token,
    )
    assert layout.layers[:2] == alone.layers
    for reader, source in zip(layout.layers[2:], (1, 0), strict=True):
        assert replace(reader, spec=own[source]) == alone.layers[source]


def test_int4_refuses_an_odd_head_dim_and_names_the_layer() -> None:
    """int4 with an odd head_dim is refused; the message names the layer and what to use instead."""
    with pytest.raises(InvalidConfig, match=r"layer 1 has head_dim 65, which is odd; use int8 or fp8"):
        BlockLayout.of([LayerSpec(8, 8, 64), LayerSpec(8, 8, 65)], 16, KvDtype.INT4)
    assert BlockLayout.of([LayerSpec(8, 8, 65)], 16, KvDtype.INT8).layers[0].spec.head_dim == 65


def test_unknown_kv_dtypes_are_refused_with_those_that_exist() -> None:
    """`auto` is the model's dtype."""
    assert choose_kv_dtype("auto", "bfloat16") is KvDtype.BFLOAT16
    assert choose_kv_dtype("int4", "bfloat16") is KvDtype.INT4
    with pytest.raises(InvalidConfig, match="kv-dtype is 'int3'; use auto, bf16, fp16, fp8, int8, int4"):
        choose_kv_dtype("int3", "bfloat16")


def test_the_arithmetic_needs_no_torch() -> None:
    """block_layout imports no torch."""
    code = "import sys, coatcheck.workers.kv.block_layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
