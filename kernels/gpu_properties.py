"""GpuProperties: the properties of a GPU on which launch parameters depend. They are plain numbers, so tests need no
GPU.

`uses_triton`: whether the Triton kernels compute on a tensor.
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
    large tiles. sm_120 has the matrix products of sm_80.
    `warp_groups`: a group of four warps multiplies 64 rows at a time, with the sums in registers (wgmma of sm_90).
    `convert`: how kernels convert quantised bytes to floats. 0: integer operations, 1: Triton's casts, 2: PTX, 3: PTX
    with e4m3 conversions (sm_89 and later).
    `processors`: the number of streaming multiprocessors or compute units.
    `max_stages`: the most pipeline stages that the compiler supports.
    `has_prefill_ptx`: the prefill kernel converts bytes by PTX, too. Triton 3.7 fails to compile it with PTX for
    sm_100.
    `has_fp8_products`, `has_int8_products`: whether the kernels multiply e4m3 by e4m3, and int8 by int8. gfx942 has
    another e4m3 format, and its int8 products were not tried. For sm_100 Triton 3.7 compiles int8 products to mma.sync
    only.
    """

    shared: int
    wide_tiles: bool
    convert: int
    processors: int
    max_stages: int = 5
    has_prefill_ptx: bool = True
    has_fp8_products: bool = True
    has_int8_products: bool = True
    warp_groups: bool = False

    @property
    def prefill_convert(self) -> int:
        """`convert` for the prefill kernel."""
        return self.convert if self.has_prefill_ptx else 1


# The lowest compute capability of NVIDIA GPUs for which the kernels are compiled and tested.
LEAST_CAPABILITY = (8, 0)

SM_80 = GpuProperties(163 * 1024, False, 2, 108, has_fp8_products=False)
SM_89 = GpuProperties(99 * 1024, False, 3, 142)  # L40S
SM_90 = GpuProperties(227 * 1024, True, 3, 132, warp_groups=True)
SM_100 = GpuProperties(227 * 1024, True, 3, 148, has_prefill_ptx=False, has_int8_products=False)
SM_120 = GpuProperties(99 * 1024, False, 3, 188)  # RTX PRO 6000
GFX942 = GpuProperties(64 * 1024, False, 0, 304, max_stages=2, has_fp8_products=False, has_int8_products=False)


# The Triton kernels compute on tensors of these devices. In Triton's interpreter (TRITON_INTERPRET=1) also on CPU
# tensors, so that whole models can be tested without a GPU.
TRITON_DEVICES = {"cuda", "cpu"} if triton.knobs.runtime.interpret else {"cuda"}


def uses_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute on the tensor: always on a GPU, on a CPU only in Triton's interpreter."""
    return tensor.device.type in TRITON_DEVICES


@cache
def gpu_properties(device: torch.device) -> GpuProperties:
    """The properties of a CUDA or ROCm device. In Triton's interpreter: sm_90 without PTX, for every device."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return SM_90._replace(convert=1)
    if torch.version.hip is not None:
        return GFX942
    capability = torch.cuda.get_device_capability(device)
    # These are the limits by which Triton refuses launches.
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return GpuProperties(
        limits["max_shared_mem"],
        wide_tiles=(9, 0) <= capability < (12, 0),
        convert=3 if capability >= (8, 9) else 2,
        processors=limits["multiprocessor_count"],
        has_prefill_ptx=not (10, 0) <= capability < (12, 0),
        has_fp8_products=capability >= (8, 9),
        has_int8_products=not (10, 0) <= capability < (12, 0),
        warp_groups=(9, 0) <= capability < (10, 0),
    )
