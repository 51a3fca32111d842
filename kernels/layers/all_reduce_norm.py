"""One-shot all-reduce of a row-parallel linear's output, residual add and RMSNorm, in one kernel.

    s = cast(sum over ranks r = 0, 1, ... of x_r)      (float32, rounded once)
    h, y = s + residual, norm(s + residual)            (as rms_norm.py)

y can also, or only, be written as codes and scales for linears over quantised activations (quantised_rows.py).

Shapes: x, residual, h and y [T, hidden], contiguous. Every rank reads the x of all ranks and adds them in the order of
ranks, so all ranks get the same bits. Program p of P computes the rows p, p + P, ...: it copies them into its rank's
buffer, waits for program p of the other ranks (peer_memory.py), and reads. It waits for them again before it ends,
because until then they may read its rank's buffer.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, once_per_geometry, refuse
from coatcheck.kernels.layers.quantised_rows import (
    QuantisedRows,
    RowFormat,
    _largest_magnitude,
    _store_codes,
    code_arguments,
)
from coatcheck.kernels.layers.rms_norm import RmsNorm, rms_norm_reference
from coatcheck.kernels.peer_memory import MAX_PROGRAMS, PeerMemory, meet_peers


@triton.jit(do_not_specialize=["rank", "rows"])
def _all_reduce_norm(
    x, residual, weight, out, codes, scales, total, buffers, signals, epochs, rank, rows, width, eps, offset,
    SIZE: tl.constexpr, PADDED: tl.constexpr, CAST_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    mask = at < width
    element = total.dtype.element_ty
    stride = width.to(tl.int64)
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(element)), 16)
    for row in range(first, rows, step):
        start = row * stride
        tl.store(own + start + at, tl.load(x + start + at, mask), mask)
    meet_peers(signals, epochs, rank, SIZE, PADDED)
    w = tl.load(weight + at, mask, other=0.0).to(tl.float32) + offset
    for row in range(first, rows, step):
        start = row * stride
        h = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            part = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(element)), 16)
            # Not from the L1 cache, which may hold the data of an earlier call.
            h += tl.load(part + start + at, mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        more = tl.load(residual + start + at, mask, other=0.0).to(tl.float32)
        rounded = (h.to(element).to(tl.float32) + more).to(element)
        tl.store(total + start + at, rounded, mask)
        h = rounded.to(tl.float32)
        h = h / tl.sqrt(tl.sum(h * h, 0) / width + eps)
        if CAST_FIRST:
            h = h.to(element).to(tl.float32)
        y = (h * w).to(element)
        if out is not None:
            tl.store(out + start + at, y, mask)
        if codes is not None:
            y = y.to(tl.float32)
            _store_codes(y, _largest_magnitude(y, 0), codes, scales, row, rows, 0, width, KIND, GROUP, BLOCK)
    meet_peers(signals, epochs, rank, SIZE, PADDED)


def all_reduce_add_norm(x: Tensor, residual: Tensor, norm: RmsNorm, peers: PeerMemory) -> tuple[Tensor, Tensor]:
    """(norm(s + residual), s + residual), where s is the sum of `x` over ranks. A collective: every rank calls this
    with the same shapes.

    `x` must fit into `peers.nbytes`. For CUDA tensors, and in Triton's interpreter.
    """
    out = torch.empty_like(x)
    return out, _launch(x, residual, norm, peers, out, None)


def all_reduce_add_norm_and_quantise(
    x: Tensor, residual: Tensor, norm: RmsNorm, peers: PeerMemory, format: RowFormat, *, keeps_plain: bool = False
) -> tuple[QuantisedRows, Tensor]:
    """As `all_reduce_add_norm`, with the norm's output quantised to `format`. `keeps_plain`: write it unquantised,
    too."""
    rows = QuantisedRows.empty(x.shape[0], x.shape[1], format, x.dtype, x.device)
    if keeps_plain:
        rows = rows._replace(plain=torch.empty_like(x))
    return rows, _launch(x, residual, norm, peers, rows.plain, rows)


def _launch(
    x: Tensor, residual: Tensor, norm: RmsNorm, peers: PeerMemory, out: Tensor | None, rows: QuantisedRows | None
) -> Tensor:
    """Write the norm's output to `out`, to `rows`, or to both. Returns s + residual."""
    _check(x, residual, norm.weight, peers.nbytes)
    total = torch.empty_like(x)
    tokens, width = x.shape
    if tokens:
        block, codes, scales, constants = code_arguments(rows, width)
        _all_reduce_norm[(min(tokens, MAX_PROGRAMS),)](
            x, residual, norm.weight, out, codes, scales, total, peers.buffers, peers.signals, peers.epochs,
            peers.rank, tokens, width, norm.eps, norm.offset,
            SIZE=peers.size, PADDED=triton.next_power_of_2(peers.size), CAST_FIRST=norm.rounds_first, BLOCK=block,
            **constants, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return total


@once_per_geometry
def _check(x: Tensor, residual: Tensor, weight: Tensor, nbytes: int) -> None:
    check_dtype("x", x, *FLOATS)
    check_dense("x", x, (None, None), x.dtype, x.device)
    check_dense("residual", residual, tuple(x.shape), x.dtype, x.device)
    check_dense("weight", weight, (x.shape[1],), x.dtype, x.device)
    if x.nbytes > nbytes:
        refuse("x", f"at most {nbytes} bytes, the ranks' buffers", x.nbytes)


def all_reduce_add_norm_reference(parts: list[Tensor], residual: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """`parts`: x of every rank, in rank order."""
    wide = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        wide += part.float()
    return rms_norm_reference(
        wide.to(residual.dtype), norm.weight, norm.eps, residual, norm.offset, rounds_last=norm.rounds_last
    )
