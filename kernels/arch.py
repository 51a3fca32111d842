"""Arch: what launch parameters depend on of a GPU. Pure numbers, so that every choice can be tested without one.

The file does not know any kernel.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]


class Arch(NamedTuple):
    """`shared`: bytes that a program may have. `wide_tiles`: matrix products that read both sides from shared memory
    (sm_90 and later), which leaves registers for large tiles. `converts_fp8`: e4m3 is known to the processor."""

    shared: int
    wide_tiles: bool
    converts_fp8: bool


SM_80 = Arch(163 * 1024, False, False)
SM_90 = Arch(227 * 1024, True, True)
GFX942 = Arch(64 * 1024, False, False)


@cache
def arch_of(device: torch.device) -> Arch:
    """That of a CUDA or ROCm device; the interpreter's tensors are on no GPU, and take an sm_90's choices."""
    if device.type != "cuda":
        return SM_90
    if torch.version.hip is not None:
        return GFX942
    capability = torch.cuda.get_device_capability(device)
    # What Triton itself holds a launch to.
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return Arch(limits["max_shared_mem"], capability >= (9, 0), capability >= (8, 9))
