"""y += (x @ A^T) @ B on GPUs, for the rows that have a LoRA adapter: two Triton kernels, as in Punica and S-LoRA.

    shrunk = x @ A^T          float32 [rows, width]: `_shrink`
    y      = y + shrunk @ B   float32, rounded once: `_expand`

A linear has the A and B of all adapters in one tensor each, in its own dtype. A program computes a tile of rows that
have one adapter (lora_tiles.py). The other rows are in no tile, so they keep their bits. `_expand` rounds x @ A^T to
the dtype of B, because matrix products of GPUs take two factors of one dtype. All sums are float32.

The order of a row's sums depends on the shapes of the linear and its adapters alone. As in invariant_linear.py, the
columns of x are divided into units. If the step has few rows, programs compute the units side by side; otherwise one
program computes all. The units are added in the same order either way.

Shapes: x [rows, depth], y [rows, features], both contiguous and of the linear's dtype.

Chen et al., Punica: Multi-Tenant LoRA Serving, 2023 (https://arxiv.org/abs/2310.18547). Sheng et al., S-LoRA: Serving
Thousands of Concurrent LoRA Adapters, 2023 (https://arxiv.org/abs/2311.03285).
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels.gpu_properties import GpuProperties, gpu_properties
from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, check_shape, refuse
from coatcheck.kernels.lora.lora_linear import LoraPart
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.kernels.lora.lora_tiles import BLOCK_M, LoraTiles, pack_tiles, view_tiles

_MOST_UNITS: Final = 8  # `_expand` adds the units of a row, so more units take it more time
_LEAST_UNIT: Final = 512  # columns
_SPLIT_ROWS: Final = 256  # with more rows, one program computes all units of a tile
_BLOCK_N: Final = 128  # features of a program of `_expand`
_ALIGN: Final = tl.constexpr(16)  # elements by which the rows of B are aligned, so that loads are wide


class LoraLaunch(NamedTuple):
    """`block_r`: rows of A of a program of `_shrink`. `block_k`: columns of x at a time. `columns`: of a unit. `rank`:
    rows of B at a time."""

    block_r: int
    block_k: int
    units: int
    columns: int
    rank: int
    num_stages: int


def pick_launch(depth: int, width: int, most_rank: int, element_size: int, gpu: GpuProperties) -> LoraLaunch:
    """The launch of a linear. It must not depend on the number of rows. `width`: the largest sum of an adapter's ranks.
    `most_rank`: the largest rank of a part."""
    block_r, rank = _block_of(width), _block_of(most_rank)
    block_k = 128 if element_size == 2 else 64
    units = max(1, min(_MOST_UNITS, depth // _LEAST_UNIT))
    columns = triton.cdiv(triton.cdiv(depth, units), block_k) * block_k
    stage = (BLOCK_M + block_r) * block_k * element_size
    stages = min(gpu.max_stages, 3, gpu.shared // stage)
    return LoraLaunch(block_r, block_k, triton.cdiv(depth, columns), columns, rank, stages)


def _block_of(rank: int) -> int:
    """The rows of A or B of a block: `tl.dot` takes no fewer than 16."""
    block: int = triton.next_power_of_2(rank)
    return min(64, max(16, block))


class StackedLora:
    """The parts of every adapter for one linear, on a GPU.

    `adapters`: the parts of each adapter, of the linear's dtype, indexed as LoraTiles' adapters; an adapter may have
    none. `weight_shape`: [out_features, in_features] of the linear. Raises LaunchRefused.
    """

    def __init__(
        self,
        step: LoraStep,
        adapters: Sequence[Sequence[LoraPart]],
        weight_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.step = step
        self.features, self.depth = weight_shape
        self.dtype = dtype
        self._num_adapters = len(adapters)
        if dtype not in FLOATS:
            refuse("dtype", f"{' or '.join(map(str, FLOATS))}", dtype)
        every = [part for parts in adapters for part in parts]
        for part in every:
            check_dense("A", part.a, (None, self.depth), dtype, part.a.device)
            check_dense("B", part.b, (part.a.shape[0], None), dtype, part.b.device)
            if part.column + part.b.shape[1] > self.features:
                refuse("B", f"at most {self.features - part.column} features", part.b.shape[1])
        # The columns of y that parts add to: those of each merged linear.
        self._slices = sorted({(part.column, part.column + part.b.shape[1]) for part in every})
        rows = [sum(part.a.shape[0] for part in parts) for parts in adapters]
        align = _ALIGN.value
        self._width = -(-max(rows, default=0) // align) * align
        self._a = torch.cat([part.a.to(device) for part in every])
        self._b = torch.zeros(sum(map(_padded_size, every)), dtype=dtype, device=device)
        spans, offsets, first, offset = [], [], 0, 0
        for parts, count in zip(adapters, rows, strict=True):
            spans.append((first, count))
            first += count
            of_slice, column = [(0, 0, 0)] * len(self._slices), 0
            for part in parts:
                rank, width = part.b.shape
                end = offset + _padded_size(part)
                self._b[offset:end].view(rank, -1)[:, :width].copy_(part.b)
                at = self._slices.index((part.column, part.column + width))
                of_slice[at] = (column, rank, offset // align)
                column, offset = column + rank, end
            offsets.append(of_slice)
        blocks = [
            (at, start, stop, first)
            for at, (start, stop) in enumerate(self._slices)
            for first in range(start, stop, _BLOCK_N)
        ]
        self._spans = torch.tensor(spans, dtype=torch.int32, device=device)
        self._parts = torch.tensor(offsets, dtype=torch.int64, device=device)
        self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
        most_rank = max((part.a.shape[0] for part in every), default=0)
        self._launch = pick_launch(self.depth, self._width, most_rank, dtype.itemsize, gpu_properties(device))
        self._is_aligned = all(start % align == 0 for start, _ in self._slices)

    @property
    def num_bytes(self) -> int:
        """Bytes of all A and B of all adapters."""
        return self._a.nbytes + self._b.nbytes

    @property
    def variant(self) -> object:
        """Equal for linears that share their kernels."""
        return self._launch, self.dtype, len(self._slices), self._is_aligned, self.depth, self.features, self._width

    def compile_kernels(self) -> None:
        """Launch every variant of the kernels once, so that none compiles later."""
        device = self._a.device
        for rows in (1, _SPLIT_ROWS + 1) if self._launch.units > 1 else (1,):
            packed = pack_tiles(np.ones(rows, np.int32), self._num_adapters)
            x, y = (torch.zeros((rows, size), dtype=self.dtype, device=device) for size in (self.depth, self.features))
            with self.step.use_tiles(view_tiles(torch.from_numpy(packed).to(device), rows)):
                self.add_to(y, x)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add to each row of `y`, in place, what its adapter in the current step gives for its row of `x`."""
        if not self.step.is_active:
            return
        x, y = x.reshape(-1, self.depth).contiguous(), y.view(-1, self.features)
        if not len(x):
            return
        tiles = self.step.tiles_of(len(x))
        check_shape("y", y, (len(x), self.features))
        for name, tensor in (("x", x), ("y", y)):
            check_dtype(name, tensor, self.dtype)
        self._add(y, x, tiles)

    def _add(self, y: Tensor, x: Tensor, given: LoraTiles) -> None:
        rows, launch, count = len(x), self._launch, len(given.tiles)
        is_split = launch.units > 1 and rows <= _SPLIT_ROWS
        units = launch.units if is_split else 1
        shrunk = torch.empty((units, rows, self._width), dtype=torch.float32, device=x.device)
        precision = "ieee" if self.dtype == torch.float32 else "tf32"
        _shrink[(count, triton.cdiv(self._width, launch.block_r), units)](
            x, self._a, self._spans, given.order, given.tiles, shrunk, rows, self.depth, self._width, launch.columns,
            SPLIT=is_split, EVEN=self.depth % launch.block_k == 0, BLOCK_M=BLOCK_M, BLOCK_R=launch.block_r,
            BLOCK_K=launch.block_k, PRECISION=precision, num_warps=4, num_stages=launch.num_stages,
        )  # fmt: skip
        _expand[(count, len(self._blocks))](
            shrunk, self._b, self._parts, self._blocks, given.order, given.tiles, y, rows, self._width, self.features,
            UNITS=units, SLICES=len(self._slices), ALIGNED=self._is_aligned, BLOCK_M=BLOCK_M, BLOCK_N=_BLOCK_N,
            RANK=launch.rank, PRECISION=precision, num_warps=4, num_stages=2,
        )  # fmt: skip


def _padded_size(part: LoraPart) -> int:
    """Elements of the B of a part, whose rows are padded to `_ALIGN`."""
    rank, width = part.b.shape
    return int(rank * -(-width // _ALIGN.value) * _ALIGN.value)


@triton.jit(do_not_specialize=["order", "tiles", "rows"])
def _shrink(
    x, a, spans, order, tiles, shrunk, rows, depth, width, columns, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_R columns of a tile's `shrunk`; with SPLIT, one unit of their sums.

    `a`: [the rows of all A, depth]. `spans`: of each adapter, the first of its rows of `a`, and how many it has.
    `shrunk`: with SPLIT [units, rows, width], indexed by the places of `order`. `columns`: columns of a unit.
    """
    tile = tiles + 3 * tl.program_id(0)
    adapter = tl.load(tile)
    if adapter < 0:
        return
    rank = tl.load(spans + 2 * adapter + 1)
    if tl.program_id(1) * BLOCK_R >= rank:
        return
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    place = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    has_m, has_r = place < tl.load(tile + 2), r < rank
    row = tl.load(order + place, has_m, other=0).to(tl.int64)
    from_x = x + row * depth
    from_a = a + (tl.load(spans + 2 * adapter) + r).to(tl.int64) * depth
    to = shrunk + place.to(tl.int64)[:, None] * width + r[None, :]
    if SPLIT:
        unit = tl.program_id(2)
        sums = _sum_columns(
            from_x, from_a, unit * columns, columns, depth, has_m, has_r, EVEN, BLOCK_M, BLOCK_R, BLOCK_K, PRECISION
        )
        to += unit.to(tl.int64) * rows * width
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for first in range(0, depth, columns):
            sums += _sum_columns(
                from_x, from_a, first, columns, depth, has_m, has_r, EVEN, BLOCK_M, BLOCK_R, BLOCK_K, PRECISION
            )
    tl.store(to, sums, has_m[:, None] & has_r[None, :])


@triton.jit
def _sum_columns(
    from_x, from_a, first, columns, depth, has_m, has_r, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_R]: the sum over the unit that begins at column `first`. EVEN: BLOCK_K divides depth."""
    sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(first, tl.minimum(first + columns, depth), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        is_x, is_a = has_m[:, None], has_r[None, :]
        if not EVEN:
            is_x, is_a = is_x & (k < depth)[None, :], is_a & (k < depth)[:, None]
        of_x = tl.load(from_x[:, None] + k[None, :], is_x, other=0.0)
        of_a = tl.load(from_a[None, :] + k[:, None], is_a, other=0.0)
        sums = tl.dot(of_x, of_a, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["order", "tiles", "rows"])
def _expand(
    shrunk, b, parts, blocks, order, tiles, y, rows, width, features, UNITS: tl.constexpr, SLICES: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program adds to BLOCK_N columns of a tile's rows of y.

    `b`: the rows of all B, padded to _ALIGN. `parts`: int64 [adapters, SLICES, 3], of each part: its first column of
    `shrunk`, its rank, which is 0 if the adapter lacks the part, and where its B begins, in units of _ALIGN. `blocks`:
    [programs, 4], of each program: its slice, the first and the end of the slice's columns of y, and the first of its
    own. ALIGNED: _ALIGN divides the first columns.
    """
    tile = tiles + 3 * tl.program_id(0)
    adapter = tl.load(tile)
    if adapter < 0:
        return
    block = blocks + 4 * tl.program_id(1)
    part = parts + (adapter * SLICES + tl.load(block)) * 3
    rank = tl.load(part + 1).to(tl.int32)
    if rank == 0:
        return
    start, stop, first = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if ALIGNED:
        start, first = tl.multiple_of(start, _ALIGN), tl.multiple_of(first, _ALIGN)
    place = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    has_m = place < tl.load(tile + 2)
    row = tl.load(order + place, has_m, other=0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    has_n = first + n < stop
    stride = tl.cdiv(stop - start, _ALIGN) * _ALIGN
    from_b = b + tl.load(part + 2) * _ALIGN + (first - start) + n
    from_shrunk = shrunk + place.to(tl.int64) * width + tl.load(part)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for done in range(0, rank, RANK):
        r = done + tl.arange(0, RANK)
        has_r = r < rank
        h = tl.zeros([BLOCK_M, RANK], tl.float32)
        for unit in tl.static_range(UNITS):
            at = from_shrunk[:, None] + (tl.full([], unit, tl.int64) * rows * width + r)[None, :]
            h += tl.load(at, has_m[:, None] & has_r[None, :], other=0.0)
        of_b = tl.load(from_b[None, :] + r.to(tl.int64)[:, None] * stride, has_r[:, None] & has_n[None, :], other=0.0)
        sums = tl.dot(h.to(b.dtype.element_ty), of_b, sums, input_precision=PRECISION)
    to = y + row[:, None] * features + first + n[None, :]
    mask = has_m[:, None] & has_n[None, :]
    tl.store(to, (tl.load(to, mask, other=0.0).to(tl.float32) + sums).to(y.dtype.element_ty), mask)
