"""Arch: what launch parameters depend on of a GPU, as pure numbers, so that every choice can be tested without one.

Also which tensors Triton's kernels take at all. The file does not know any kernel.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor


class Arch(NamedTuple):
    """`shared`: bytes that a program may have. `wide_tiles`: matrix products that read both sides from shared memory
    (sm_90 and later), which leaves registers for large tiles. `convert`: how quantised bytes become numbers: 0 by plain
    operations, 1 by Triton's own casts, 2 by PTX, 3 by PTX that knows e4m3 (sm_89 and later).
    `processors`: how many programs, or handfuls of them, run at once. `most_stages`: that the compiler overlaps."""

    shared: int
    wide_tiles: bool
    convert: int
    processors: int
    most_stages: int = 5


SM_80 = Arch(163 * 1024, False, 2, 108)
SM_90 = Arch(227 * 1024, True, 3, 132)
GFX942 = Arch(64 * 1024, False, 0, 304, most_stages=2)


# CPU tensors too where programs run in Triton's interpreter (TRITON_INTERPRET=1), so that whole models can be proved.
TRITON_DEVICES = {"cuda", "cpu"} if triton.knobs.runtime.interpret else {"cuda"}


def takes_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels are what computes on this tensor's device."""
    return tensor.device.type in TRITON_DEVICES


@cache
def arch_of(device: torch.device) -> Arch:
    """That of a CUDA or ROCm device; the interpreter takes an sm_90's choices but PTX, wherever its tensors are."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return SM_90._replace(convert=1)
    if torch.version.hip is not None:
        return GFX942
    capability = torch.cuda.get_device_capability(device)
    # What Triton itself holds a launch to.
    limits = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    convert = 3 if capability >= (8, 9) else 2
    return Arch(limits["max_shared_mem"], capability >= (9, 0), convert, limits["multiprocessor_count"])
