"""The keys of linears and of the kernels that write the codes of rows; see tests/kernels/triton/kernel_keys.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.layers import (
    invariant_linear,
    quantised_linear,
    quantised_rows,
    rms_norm,
    silu_mul,
    w8a8_linear,
)
from coatcheck.kernels.layers.quantised_linear import Codes
from coatcheck.kernels.layers.quantised_weight import CodeKind

Keys = Callable[[GpuProperties], "Key | None"]  # None: not launched on such a GPU


class Key(NamedTuple):
    kernel: Any
    arguments: str  # one type per run-time argument, in the kernel's order
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    fuses: bool = True  # multiplications with additions


CODES = (
    ("rms_norm", rms_norm._rms_norm),
    ("silu_mul", silu_mul._silu_mul_codes),
    ("quantise_rows", quantised_rows._quantise_rows),
)


def linear(
    kind: CodeKind, rows: int, gpu: GpuProperties, *, dtype: str = "bf16", group: int = 128, zeros: str = "",
    is_ordered: bool = False, batch_invariant: bool = False,
) -> Key:  # fmt: skip
    """A linear of 4096 features over 4096 columns, with scales of the model's dtype, MXFP4's of bytes. `group` 0: a
    scale for a row. `zeros`: the dtype of zero points, i8 or fp32, with which scales are float32 too; "": none.
    `batch_invariant`: of the deterministic mode."""
    weight = codes(kind, dtype, group)
    if is_ordered:
        weight = weight._replace(order=weight.codes)
    if zeros == "fp32":
        weight = weight._replace(zeros=torch.empty((0, 0), dtype=torch.float32, device="meta"))
    size = 4 if dtype == "fp32" else 2
    launch, step = quantised_linear.pick_launch(rows, weight, size, gpu, batch_invariant=batch_invariant)
    units, _ = quantised_linear.units_of(rows, weight, launch, gpu, batch_invariant=batch_invariant)
    split = units > 1 and rows <= quantised_linear._SPLIT_ROWS
    scales = scale_type(kind, dtype, zeros)
    order = "*i32 " if is_ordered else ""
    constants: dict[str, Any] = dict(
        KIND=int(kind), CONVERT=gpu.convert, GROUP=group, HALF=weight.step, STEP=step, BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n, PRECISION="ieee" if dtype == "fp32" else "tf32", WHOLE=units == 1, bias=None,
        **({} if zeros else dict(zeros=None)), **({} if is_ordered else dict(order=None)),
        **({} if split else dict(sums=None, counters=None)),
    )  # fmt: skip
    sums = "*fp32 *i32 " if split else ""
    arguments = f"*{dtype} *u8 *{scales} {zero_type(zeros)}{order}*{dtype} {sums}i32 i32 i32 i32 i32"
    fuses = group > 0 or not batch_invariant or dtype == "fp32"
    return Key(quantised_linear._quantised_linear, arguments, constants, launch.num_warps, launch.num_stages, fuses)


def scale_type(kind: CodeKind, dtype: str, zeros: str) -> str:
    """The dtype of scales: bytes of MXFP4, float32 beside zero points of float32 (GGUF), otherwise the model's."""
    return "u8" if kind is CodeKind.FP4 else "fp32" if zeros == "fp32" else dtype


def zero_type(zeros: str) -> str:
    return f"*{zeros} " if zeros else ""


def dequantised(
    kind: CodeKind, gpu: GpuProperties, *, dtype: str = "bf16", group: int = 128, zeros: str = ""
) -> Key:  # fmt: skip
    """The kernel that writes the weight of such a linear."""
    constants: dict[str, Any] = dict(
        KIND=int(kind), CONVERT=gpu.convert, GROUP=group, STEP=codes(kind, dtype, group).step,
        BLOCK_N=quantised_linear._DEQUANTISED_ROWS, **({} if zeros else dict(zeros=None)),
    )  # fmt: skip
    arguments = f"*u8 *{scale_type(kind, dtype, zeros)} {zero_type(zeros)}*{dtype} i32 i32 i32 i32 i32"
    return Key(quantised_linear._dequantise, arguments, constants)


def codes(kind: CodeKind, dtype: str, group: int, format: quantised_rows.RowFormat | None = None) -> Codes:
    """A weight of 4096 features and columns, without numbers."""
    step = quantised_linear.step_of(kind, 4096, group, 4 if dtype == "fp32" else 2)
    assert step is not None
    empty = torch.empty((4096, 512 * kind.bits), device="meta")
    return Codes(kind, (4096, 4096), step, group, empty, empty, None, None, format)


def fixed_linear(
    rows: int, gpu: GpuProperties, *, dtype: str = "bf16", heads: int = 1, has_bias: bool = False
) -> Key:  # fmt: skip
    """A linear of the deterministic mode: 4096 features of 4096 columns. `heads`: 128 features of 512 columns for each,
    with the columns of the weight a row apart."""
    features, depth = (4096, 4096) if heads == 1 else (128, 512)
    launch = invariant_linear.pick_launch(4 if dtype == "fp32" else 2, gpu)
    units, _ = invariant_linear.units_of(heads, features, depth, launch, gpu)
    split = invariant_linear.is_split(rows, heads, features, units, launch, gpu)
    strides = "i32 i32 i32 i32 i32 i32"
    constants = dict(
        SPLIT=split, EVEN=True, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        PRECISION="ieee" if dtype == "fp32" else "tf32",
        **(dict(w_feature=1) if heads > 1 else dict(w_column=1)), **({} if has_bias else dict(bias=None)),
    )  # fmt: skip
    of = f"*{dtype}"
    arguments = f"{of} {of} {of + ' ' if has_bias else ''}{'*fp32' if split else of} i32 i32 i32 i32 i32 i32 i32 "
    return Key(invariant_linear._invariant_linear, arguments + strides, constants, 4, launch.num_stages)


def w8a8(kind: CodeKind, rows: int, group: int, gpu: GpuProperties) -> Key | None:
    """A linear of 4096 features over 4096 columns of codes, with quantised activations."""
    if not (gpu.has_fp8_products if kind is CodeKind.FP8 else gpu.has_int8_products):
        return None
    launch, block_k = w8a8_linear.pick_w8a8_launch(rows, 4096, group, gpu)
    constants = dict(GROUP=group, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=block_k, bias=None)
    element = "fp8e4nv" if kind is CodeKind.FP8 else "i8"
    arguments = f"*{element} *fp32 *{element} *fp32 *bf16 i32 i32 i32 i32"
    return Key(w8a8_linear._w8a8_linear, arguments, constants, launch.num_warps, launch.num_stages)


def row_codes(
    kernel: Any, format: quantised_rows.RowFormat, gpu: GpuProperties, *, keeps_plain: bool = False
) -> Key:  # fmt: skip
    """A kernel that writes codes and scales of rows of 4096 columns."""
    constants: dict[str, Any] = dict(BLOCK=4096, **format.constants())
    if kernel is rms_norm._rms_norm:
        plain = "*bf16 " if keeps_plain else ""
        arguments = f"*bf16 *bf16 *bf16 {plain}*u8 *fp32 *bf16 i32 i32 i32 i32 i32 i32 fp32 fp32"
        constants |= dict(RESIDUAL=True, CAST_FIRST=True, **({} if keeps_plain else dict(out=None)))
        return Key(kernel, arguments, constants, 8)
    more = dict(GELU=False) if kernel is silu_mul._silu_mul_codes else {}
    return Key(kernel, "*bf16 *u8 *fp32 i32 i32 i32", constants | more, 16 if more else 8)
