"""The part `kernels`: the groups of tests/kernels/triton/kernel_checks.py with CUDA tensors.

The long groups are divided, so that their kernels are compiled by several processes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.gpu.outcome import Skipped
from tests.kernels.triton.attention_checks import POOLS, matrix
from tests.kernels.triton.kernel_checks import BFLOAT16, GROUPS
from tests.kernels.triton.linear_checks import large

LIMIT = 240.0
_MATRIX = {
    f"matrix {str(pool).removeprefix('torch.')}": partial(matrix, pools=(pool,)) for pool in (*POOLS, torch.bfloat16)
}
# "ranks" needs several processes that share a kernel, which the interpreter alone can give them on one GPU.
_DIVIDED = ("ranks", "matrix", "whole matrix", "bfloat16")
_CHECKS: dict[str, Callable[[], None]] = {
    **_MATRIX,
    **{f"bfloat16 {name}": check for name, check in BFLOAT16.items() if name != "matrix"},
    **{name: check for name, check in GROUPS.items() if name not in _DIVIDED},
    "large linears": large,
}


def names(whole: bool) -> list[str]:
    return [*_CHECKS, *(["whole matrix"] if whole else [])]


def run(name: str, device: torch.device, folder: Path) -> str:
    if device.type == "cpu":
        raise Skipped("the kernels need a GPU; tests/kernels/triton runs them in Triton's interpreter")
    torch.set_default_device(device)
    try:
        (_CHECKS.get(name) or GROUPS[name])()
        torch.cuda.synchronize(device)
    finally:
        torch.set_default_device(None)
    return ""
