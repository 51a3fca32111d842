"""The keys of the kernels that add LoRA adapters; see tests/kernels/triton/kernel_keys.py.

Adapters of rank 16 for a merged QKV of 6144 features over 4096 columns: three parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.lora import lora_tiles, shrink_expand
from tests.kernels.layers.linear_keys import Key, Keys

_DEPTH = 4096


def _precision(dtype: str) -> str:
    return "ieee" if dtype == "fp32" else "tf32"


def _launch(dtype: str, rank: int, gpu: GpuProperties) -> shrink_expand.LoraLaunch:
    return shrink_expand.pick_launch(_DEPTH, 3 * rank, rank, 4 if dtype == "fp32" else 2, gpu)


def shrink(dtype: str, rank: int, gpu: GpuProperties, *, is_split: bool) -> Key:
    launch = _launch(dtype, rank, gpu)
    constants = dict(
        SPLIT=is_split, EVEN=True, BLOCK_M=lora_tiles.BLOCK_M, BLOCK_R=launch.block_r, BLOCK_K=launch.block_k,
        PRECISION=_precision(dtype),
    )  # fmt: skip
    arguments = f"*{dtype} *{dtype} *i32 *i32 *i32 *fp32 i32 i32 i32 i32"
    return Key(shrink_expand._shrink, arguments, constants, 4, launch.num_stages)


def expand(dtype: str, rank: int, gpu: GpuProperties, *, is_split: bool) -> Key:
    launch = _launch(dtype, rank, gpu)
    constants = dict(
        UNITS=launch.units if is_split else 1, SLICES=3, ALIGNED=True, BLOCK_M=lora_tiles.BLOCK_M,
        BLOCK_N=shrink_expand._BLOCK_N, RANK=launch.rank, PRECISION=_precision(dtype),
    )  # fmt: skip
    arguments = f"*fp32 *{dtype} *i64 *i32 *i32 *i32 *{dtype} i32 i32 i32"
    return Key(shrink_expand._expand, arguments, constants, 4, 2)


LORA_KEYS: dict[str, Keys] = {
    "LoRA shrink, few": partial(shrink, "bf16", 16, is_split=True),
    "LoRA shrink, many": partial(shrink, "bf16", 16, is_split=False),
    "LoRA expand, few": partial(expand, "bf16", 16, is_split=True),
    "LoRA expand, many": partial(expand, "bf16", 16, is_split=False),
}


def other_lora_keys() -> Iterator[tuple[str, Keys]]:
    for is_split, count in ((True, "few"), (False, "many")):
        for name, kernel in (("shrink", shrink), ("expand", expand)):
            yield f"LoRA {name}, {count}, rank 64", partial(kernel, "bf16", 64, is_split=is_split)
            yield f"LoRA {name}, {count}, fp32", partial(kernel, "fp32", 16, is_split=is_split)
