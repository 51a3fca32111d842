"""out[t, i] = act(gate_up[t, i]) * gate_up[t, I + i], computed in float32 and rounded once.

Shapes: gate_up [tokens, 2 * I] (rows may be strided), out [tokens, I] dense, same dtype. act is `silu` or `gelu_tanh`.
One program computes a part of one row.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import FLOATS, check_dtype, check_rows, once_per_geometry, refuse

ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def _silu_mul(gate_up, out, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * stride + at, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask, other=0.0).to(tl.float32)
    # x * sigmoid(x), and for gelu's tanh form x * sigmoid(2u): exp of a negative amount never overflows to NaN.
    u = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-u)) * up).to(out.dtype.element_ty), mask)


def silu_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
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
