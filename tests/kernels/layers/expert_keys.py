"""The keys of the products of experts; see tests/kernels/triton/kernel_keys.py."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from coatcheck.kernels.gpu_properties import GpuProperties
from coatcheck.kernels.layers import grouped_gemm
from coatcheck.kernels.layers.quantised_linear import Codes
from coatcheck.kernels.layers.quantised_rows import RowFormat
from coatcheck.kernels.layers.quantised_weight import CodeKind
from tests.kernels.layers.linear_keys import Key, codes, scale_type, zero_type


def grouped(kernel: Any, dtype: str, tokens: int, gpu: GpuProperties, *, oss: bool = False) -> Key:
    """A product of 128 experts, 8 for each token; `oss`: with biases and gpt-oss' activation."""
    size = 4 if dtype == "fp32" else 2
    launch = grouped_gemm.pick_launch(tokens * 8, 128, size, gpu)
    constants: dict[str, Any] = dict(
        BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        PRECISION="ieee" if dtype == "fp32" else "tf32", **({} if oss else dict(bias=None)),
    )  # fmt: skip
    floats = ""
    if kernel is grouped_gemm._gate_up:
        constants |= dict(TOP_K=8, ACTIVATION=2 if oss else 0)
        floats = "fp32 fp32"
    tensors = " ".join([f"*{dtype}"] * (4 if oss else 3))
    arguments = f"{tensors} *i32 *i32 *i32 i32 i32 {floats}"
    return Key(kernel, arguments, constants, launch.num_warps, launch.num_stages)


def quantised_experts(
    kernel: Any, kind: CodeKind, tokens: int, gpu: GpuProperties, *, dtype: str = "bf16", group: int = 128,
    zeros: str = "",
) -> Key:  # fmt: skip
    """A product of 128 quantised experts, 8 for each token. `group`: columns of a group; 0: a whole row. `zeros`: as in
    linear_keys.linear."""
    launch = grouped_gemm.pick_launch(8 * tokens, 128, 4 if dtype == "fp32" else 2, gpu)
    weight = codes(kind, dtype, group)
    return _experts(
        kernel, weight, grouped_gemm.pick_codes_launch(launch, weight, None, gpu), gpu, f"*{dtype}", "*u8",
        f"*{scale_type(kind, dtype, zeros)}", dtype, zeros,
    )  # fmt: skip


def w8a8_experts(kernel: Any, kind: CodeKind, group: int, tokens: int, gpu: GpuProperties) -> Key | None:
    """The same with quantised activations; gate_up writes codes where its groups are those of `group`, not 0."""
    if not (gpu.has_fp8_products if kind is CodeKind.FP8 else gpu.has_int8_products):
        return None
    launch = grouped_gemm.pick_launch(8 * tokens, 128, 2, gpu, of_codes=True)
    format = RowFormat(kind, group)
    to = format if group and kernel is grouped_gemm._quantised_gate_up else None
    weight = codes(kind, "bf16", group, format)
    tile = grouped_gemm.pick_codes_launch(launch, weight, to, gpu)
    element = "*fp8e4nv" if kind is CodeKind.FP8 else "*i8"
    constants = {f"TO_{name}": value for name, value in format.constants().items()} if to is not None else {}
    return _experts(kernel, weight, tile, gpu, f"{element} *fp32", element, "*fp32", "bf16", "", **constants)


def _experts(
    kernel: Any, weight: Codes, tile: grouped_gemm.GroupedLaunch, gpu: GpuProperties, x: str, element: str,
    scales: str, dtype: str, zeros: str, **more: int,
) -> Key:  # fmt: skip
    """`x`: types of x and its scales, if there are. `element`: type of the codes. `more`: of codes that are written
    TO_KIND and TO_GROUP."""
    sizes = dict(BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k)
    constants: dict[str, Any] = dict(
        KIND=int(weight.kind), GROUP=weight.group, HALF=weight.step, CONVERT=gpu.convert,
        PRECISION="ieee" if dtype == "fp32" else "tf32", bias=None, **sizes, **more,
        **({} if zeros else dict(zeros=None)),
    )  # fmt: skip
    scales = f"{scales} {zero_type(zeros)}".strip()
    has_scales = " " in x
    if kernel is grouped_gemm._quantised_gate_up:
        if not has_scales:
            constants |= dict(x_scales=None)
        gated = "*u8 *fp32" if "TO_KIND" in more else f"*{dtype}"
        if "TO_KIND" not in more:
            constants |= dict(TO_KIND=0, TO_GROUP=0, gated_scales=None)
        constants |= dict(TOP_K=8, ACTIVATION=0, ELEMENT=getattr(tl, _ELEMENTS[dtype]))
        arguments = f"{x} {element} {scales} {gated} *i32 *i32 *i32 i32 i32 i32 i32 i32 i32 fp32 fp32"
    else:
        if not has_scales:
            constants |= dict(gated_scales=None)
        arguments = f"{x} {element} {scales} *{dtype} *i32 *i32 *i32 i32 i32 i32 i32 i32"
    return Key(kernel, arguments, constants, tile.num_warps, tile.num_stages)


_ELEMENTS = {"bf16": "bfloat16", "fp32": "float32"}
