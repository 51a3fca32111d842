"""out[t, i] = act(gate_up[t, i]) * gate_up[t, I + i], computed in float32 and rounded once.

Shapes: gate_up [tokens, 2 * I] (rows may be strided), out [tokens, I], contiguous, of the same dtype. act is `silu` or
`gelu_tanh`. One program computes a part of one row. `silu_mul_and_quantise` writes out as codes and scales, for a
linear whose activations are quantised; there one program computes one row.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, once_per_geometry, refuse
from coatcheck.kernels.layers.quantised_rows import (
    QuantisedRows,
    RowFormat,
    _largest_magnitude,
    _store_codes,
    pick_block,
    quantise_rows,
)

ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def _silu_mul(gate_up, out, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + at, _activated(gate_up + row * stride, at, width, GELU), at < width)


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_codes(
    gate_up, codes, scales, stride, rows, width, GELU: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    top = tl.zeros([], tl.float32)
    if GROUP == 0:
        for start in range(0, width, BLOCK):
            part = _activated(gate_up + row * stride, start + at, width, GELU).to(tl.float32)
            top = tl.maximum(top, _largest_magnitude(part, 0))
    for start in range(0, width, BLOCK):
        part = _activated(gate_up + row * stride, start + at, width, GELU).to(tl.float32)
        _store_codes(part, top, codes, scales, row, rows, start, width, KIND, GROUP, BLOCK)


@triton.jit
def _activated(gates, at, width, GELU: tl.constexpr):
    """Columns `at` of a row of out, 0 past the end. `gates`: pointer to the row's gates, which its ups follow."""
    gate = tl.load(gates + at, at < width, other=0.0).to(tl.float32)
    up = tl.load(gates + width + at, at < width, other=0.0).to(tl.float32)
    # silu is x * sigmoid(x), gelu's tanh form x * sigmoid(2t). If exp overflows to inf, the quotient is 0, not NaN.
    u = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return (gate / (1.0 + tl.exp(-u)) * up).to(gates.dtype.element_ty)


def silu_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """out. Raises LaunchRefused."""
    if activation not in ACTIVATIONS:
        refuse("activation", " or ".join(ACTIVATIONS), activation)
    _check(gate_up)
    library = native.library_for(gate_up)
    if library is None and not uses_triton(gate_up):
        return silu_mul_reference(gate_up, activation)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    is_gelu = activation == "gelu_tanh"
    out = gate_up.new_empty((rows, width))
    if library is not None:
        library.silu_mul(
            gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width, is_gelu, native.TYPES[gate_up.dtype]
        )
    elif rows * width:
        _silu_mul[(rows, -(-width // 1024))](
            gate_up, out, gate_up.stride(0), width, GELU=is_gelu, BLOCK=1024, num_warps=4
        )
    return out


def silu_mul_and_quantise(gate_up: Tensor, activation: str, format: RowFormat) -> QuantisedRows:
    """`quantise_rows(silu_mul(gate_up, activation), format)` in one kernel, with the same codes."""
    if not uses_triton(gate_up):
        return quantise_rows(silu_mul(gate_up, activation), format)
    if activation not in ACTIVATIONS:
        refuse("activation", " or ".join(ACTIVATIONS), activation)
    _check(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = QuantisedRows.empty(rows, width, format, gate_up.dtype, gate_up.device)
    if rows * width:
        block = pick_block(width, format)
        _silu_mul_codes[(rows,)](
            gate_up, out.codes.view(torch.uint8), out.scales, gate_up.stride(0), rows, width,
            GELU=activation == "gelu_tanh", **format.constants(), BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return out


def silu_mul_for_linear(gate_up: Tensor, activation: str, format: RowFormat | None) -> Tensor | QuantisedRows:
    """out as the input of a linear with the `row_format` `format`: codes, or for None a tensor of gate_up's dtype."""
    return silu_mul(gate_up, activation) if format is None else silu_mul_and_quantise(gate_up, activation, format)


@once_per_geometry
def _check(gate_up: Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        refuse("gate_up", "shape [tokens, 2 * I]", list(gate_up.shape))
    check_dtype("gate_up", gate_up, *FLOATS)
    check_rows("gate_up", gate_up)


def silu_mul_reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)
