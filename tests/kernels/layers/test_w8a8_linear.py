"""Which activations are quantised, by which product W8A8 linears are computed, and torch's product against ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coatcheck.kernels.gpu_properties import GFX942, SM_80, SM_89, SM_90, SM_100, SM_120, GpuProperties
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows, quantise_rows_reference
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight
from coatcheck.kernels.layers.w8a8_linear import choose_format, choose_product, pick_w8a8_launch, scaled_mm
from tests.kernels.layers.quantised_weights import random_weight

FP8, INT8 = CodeKind.FP8, CodeKind.INT8


@pytest.mark.parametrize(
    ("gpu", "fp8", "int8"),
    [
        (SM_80, False, True),
        (SM_89, True, True),
        (SM_90, True, True),
        (SM_100, True, False),
        (SM_120, True, True),
        (GFX942, False, False),
    ],
)
def test_activations_are_quantised_where_the_gpu_has_the_products(gpu: GpuProperties, fp8: bool, int8: bool) -> None:
    """Other GPUs keep the model's dtype, and the choice says why."""
    for kind, is_served in ((FP8, fp8), (INT8, int8)):
        choice = choose_format(random_weight(kind, 8, 64, 64, torch.bfloat16), gpu)
        assert (choice.format == RowFormat(kind, 0)) is is_served
        assert bool(choice.reason) is not is_served


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (random_weight(CodeKind.INT4, 8, 64, 32, torch.bfloat16), "weights of 4 bits"),
        (random_weight(INT8, 8, 64, 64, torch.bfloat16, zeros=torch.int8), "zero points"),
        (random_weight(INT8, 8, 64, 32, torch.bfloat16, is_ordered=True), "reordered columns"),
        (random_weight(FP8, 8, 96, 48, torch.bfloat16), "groups of 48 columns"),
        (random_weight(FP8, 8, 64, 16, torch.bfloat16), "groups of 16 columns"),
    ],
)
def test_a_weight_without_such_a_product_says_why(weight: QuantisedWeight, reason: str) -> None:
    """Activations keep the model's dtype for other layouts of the weight."""
    choice = choose_format(weight, SM_90)
    assert choice.format is None and reason in choice.reason


def test_torch_computes_many_rows_of_fp8_with_scales_for_rows() -> None:
    """Few rows, blocks, INT8, float16, sizes that 16 does not divide, and batch invariance take Triton's kernel."""
    row, shape, bf16 = RowFormat(FP8, 0), (4096, 14336), torch.bfloat16
    assert choose_product(17, shape, row, bf16, has_scaled_mm=True) == "scaled_mm"
    assert choose_product(16, shape, row, bf16, has_scaled_mm=True) == "triton"
    assert choose_product(17, shape, row, bf16, has_scaled_mm=False) == "triton"
    assert choose_product(17, shape, row, torch.float16, has_scaled_mm=True) == "triton"
    assert choose_product(17, (4096, 40), row, bf16, has_scaled_mm=True) == "triton"
    assert choose_product(17, shape, RowFormat(FP8, 128), bf16, has_scaled_mm=True) == "triton"
    assert choose_product(17, shape, RowFormat(INT8, 0), bf16, has_scaled_mm=True) == "triton"
    assert choose_product(17, shape, row, bf16, has_scaled_mm=True, batch_invariant=True) == "triton"


def test_torchs_product_is_that_of_the_reference() -> None:
    """torch._scaled_mm, here on a CPU, gets the scales of rows and features that it expects."""
    torch.manual_seed(0)
    weight = random_weight(FP8, 48, 144, 144, torch.float32)
    bias = torch.randn(48)
    x = quantise_rows_reference(torch.randn(20, 144), RowFormat(FP8, 0))
    exact = torch.nn.functional.linear(x.dequantise(), weight.dequantise(), bias)
    y = scaled_mm(weight.codes, weight.scales.T.contiguous(), x, bias)
    assert (y - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("gpu", [SM_80, SM_89, SM_90, SM_100, SM_120])
def test_tiles_fit_the_groups_and_shared_memory(gpu: GpuProperties) -> None:
    """A product has columns of one group. With batch invariance all tiles have one shape."""
    for features in (256, 4096, 28672):
        for group in (0, 32, 64, 128, 256):
            for rows in (1, 16, 17, 64, 65, 8192):
                launch, block_k = pick_w8a8_launch(rows, features, group, gpu)
                assert 32 <= block_k <= 128 and (group == 0 or group % block_k == 0)
                assert launch.num_stages * block_k * (launch.block_m + launch.block_n) <= gpu.shared
            fixed = {pick_w8a8_launch(rows, features, group, gpu, batch_invariant=True) for rows in (1, 65, 8192)}
            assert len(fixed) == 1


def test_cpus_keep_activations_and_say_so() -> None:
    """Codes are accepted only by a linear that asked for them."""
    plain = random_weight(FP8, 16, 64, 64, torch.float32)
    weight = replace(plain, quantises_activations=True)
    linear = PackedLinear(weight)
    assert linear.row_format is None and linear.activations is not None and "CPUs" in linear.activations.reason
    x = torch.randn(3, 64)
    assert torch.equal(linear(x), PackedLinear(plain)(x)) and PackedLinear(plain).activations is None
    with pytest.raises(ValueError, match="x: expected .* as None"):
        linear(quantise_rows(x, RowFormat(FP8, 0)))


def test_what_is_made_of_a_weight_keeps_its_wish() -> None:
    """A rank's slice quantises activations as the whole weight does; weights that differ in that are not merged."""
    plain = random_weight(FP8, 16, 256, 128, torch.float32)
    weight = replace(plain, quantises_activations=True)
    part = weight.select_columns(128, 256)
    assert part is not None and part.quantises_activations
    assert weight.select_rows([(0, 8)]).quantises_activations
    both = QuantisedWeight.concatenate([weight, weight])
    assert both is not None and both.quantises_activations
    assert QuantisedWeight.concatenate([plain, weight]) is None
