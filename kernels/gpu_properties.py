"""GpuProperties: the properties of a GPU that launch parameters depend on, as numbers, so that tests need no GPU.

`uses_triton` tells whether Triton's kernels compute on a tensor.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor


class GpuProperties(NamedTuple):
    """`shared`: bytes of shared memory for a program.

    `wide_tiles`: matrix products read both operands from shared memory (sm_90 and sm_100), which leaves registers for
    large tiles. sm_120 has the products of sm_80.
    `convert`: how kernels widen quantised bytes. 0: plain operations, 1: Triton's casts, 2: PTX, 3: PTX with e4m3
    conversions (sm_89 and later).
    `processors`: streaming multiprocessors or compute units.
    `max_stages`: pipeline stages that the compiler supports.
    `has_prefill_ptx`: prefill widens bytes by PTX too. For sm_100 Triton 3.7 fails to compile the prefill with PTX.
    `has_fp8_products`, `has_int8_products`: whether the kernels multiply e4m3 with e4m3, and int8 with int8. gfx942 has
    another e4m3, and its int8 products were not tried. Triton 3.7 compiles int8 products for sm_100 to mma.sync only.
    """

    shared: int
    wide_tiles: bool
    convert: int
    processors: int
    max_stages: int = 5
    has_prefill_ptx: bool = True
    has_fp8_products: bool = True
    has_int8_products: bool = True

    @property
    def prefill_convert(self) -> int:
        """`convert` for the prefill kernel."""
        return self.convert if self.has_prefill_ptx else 1


# Of an NVIDIA GPU: the kernels are compiled and tested for it and later ones.
LEAST_CAPABILITY = (8, 0)

SM_80 = GpuProperties(163 * 1024, False, 2, 108, has_fp8_products=False)
SM_89 = GpuProperties(99 * 1024, False, 3, 142)  # L40S
SM_90 = GpuProperties(227 * 1024, True, 3, 132)
SM_100 = GpuProperties(227 * 1024, True, 3, 148, has_prefill_ptx=False, has_int8_products=False)
SM_120 = GpuProperties(99 * 1024, False, 3, 188)  # RTX PRO 6000
GFX942 = GpuProperties(64 * 1024, False, 0, 304, max_stages=2, has_fp8_products=False, has_int8_products=False)


# In Triton's interpreter (TRITON_INTERPRET=1) CPU tensors too, so that whole models can be tested without a GPU.
TRITON_DEVICES = {"cuda", "cpu"} if triton.knobs.runtime.interpret else {"cuda"}


def uses_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels compute on the tensor: on a GPU always, on a CPU in Triton's interpreter."""
    return tensor.device.type in TRITON_DEVICES


@cache
def gpu_properties(device: torch.device) -> GpuProperties:
    """The properties of a CUDA or ROCm device. In Triton's interpreter: sm_90 without PTX, for every device."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return SM_90._replace(convert=1)
    if torch.version.hip is not None:
        return GFX942
    capability = torch.cuda.get_device_capability(device)
    # Triton refuses launches by the same limits.
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return GpuProperties(
        limits["max_shared_mem"],
        wide_tiles=(9, 0) <= capability < (12, 0),
        convert=3 if capability >= (8, 9) else 2,
        processors=limits["multiprocessor_count"],
        has_prefill_ptx=not (10, 0) <= capability < (12, 0),
        has_fp8_products=capability >= (8, 9),
        has_int8_products=not (10, 0) <= capability < (12, 0),
    )
