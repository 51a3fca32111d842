"""A mark that skips tests on processors without the instructions of the C kernels. It asks torch, not the C library, so
that a library that is broken or was not built fails tests."""

import pytest
import torch

needs_avx512_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="linear layers and sublayers have C kernels only on processors with AVX512-BF16 and without AMX; "
    "run these on one, such as AMD's since Zen 4",
)
