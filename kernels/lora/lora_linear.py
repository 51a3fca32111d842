"""y += (x @ A^T) @ B for the rows that have a LoRA adapter: what adapters add to one linear on a CPU.

shrink_expand.py computes it on GPUs.

Shapes: x [rows, depth], y [rows, columns], both of the linear's dtype; rows may be strided. Each adapter has parts: A
float32 [rank, depth], and B float32 [rank, features], already multiplied by the adapter's scaling. A part adds to the
columns [column, column + features) of y. In a merged linear, such as QKV, each of the merged linears can have a part.
For each part, y is read as float32, and the sum is rounded to y's dtype. A row's result does not depend on the other
rows. Rows without an adapter do not change.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021 (https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.launch_check import check_dense, check_dtype, check_rows, check_shape, refuse
from coatcheck.kernels.lora.lora_step import LoraRows, LoraStep


@dataclass(frozen=True, slots=True)
class LoraPart:
    """`a`: [rank, depth]. `b`: [rank, features], for the columns of y from `column` on. LoraLinear takes float32, and
    StackedLora the linear's dtype."""

    a: Tensor
    b: Tensor
    column: int = 0


class LoraLinear:
    """The parts of every adapter for one linear, on a CPU.

    `adapters`: the parts of each adapter, indexed by LoraRows.adapter_indices; an adapter may have none.
    `weight_shape`: [out_features, in_features] of the linear. `dtype`: of x and y. Raises LaunchRefused.
    """

    def __init__(
        self, step: LoraStep, adapters: Sequence[Sequence[LoraPart]], weight_shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.step = step
        self.adapters = tuple(map(tuple, adapters))
        self.features, self.depth = weight_shape
        self.dtype = dtype
        if dtype not in native.TYPES:
            refuse("dtype", f"{' or '.join(map(str, native.TYPES))}", dtype)
        cpu = torch.device("cpu")
        for part in (part for parts in self.adapters for part in parts):
            check_dense("A", part.a, (None, self.depth), torch.float32, cpu)
            check_dense("B", part.b, (part.a.shape[0], None), torch.float32, cpu)
            if part.column + part.b.shape[1] > self.features:
                refuse("B", f"at most {self.features - part.column} features", part.b.shape[1])
        # The C structs point into these: the rows of all A of an adapter, stacked.
        self._stacked = [torch.cat([part.a for part in parts]) if parts else None for parts in self.adapters]
        self._width = max((a.shape[0] for a in self._stacked if a is not None), default=0)
        self.adapters = tuple(
            tuple(
                LoraPart(a, part.b, part.column)
                for a, part in zip(stacked.split([p.a.shape[0] for p in parts]), parts, strict=True)
            )
            if stacked is not None
            else ()
            for stacked, parts in zip(self._stacked, self.adapters, strict=True)
        )
        adapter_structs: list[tuple[int, ...]] = []  # LoraAdapter and LoraPart of kernels/csrc/lora.c
        part_structs: list[tuple[int, ...]] = []
        for stacked, parts in zip(self._stacked, self.adapters, strict=True):
            first, offset = len(part_structs), 0
            for part in parts:
                rank, features = part.b.shape
                part_structs.append((part.b.data_ptr(), offset, rank, part.column, features))
                offset += rank
            adapter_structs.append((0 if stacked is None else stacked.data_ptr(), offset, first, len(part_structs)))
        self._adapter_structs = torch.tensor(adapter_structs, dtype=torch.int64)
        self._part_structs = torch.tensor(part_structs, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of all A and B of all adapters."""
        return sum(part.a.nbytes + part.b.nbytes for parts in self.adapters for part in parts)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add to each row of `y`, in place, what its adapter in the current step gives for its row of `x`."""
        if not self.step.is_active:
            return
        x, y = x.reshape(-1, self.depth), y.view(-1, self.features)
        rows = self.step.rows_of(x.shape[0])
        assert rows is not None
        if not len(rows.rows):
            return
        check_shape("y", y, (x.shape[0], self.features))
        for name, tensor in (("x", x), ("y", y)):
            check_dtype(name, tensor, self.dtype)
            check_rows(name, tensor)
        library = native.library()
        if library is None:
            lora_reference(self.adapters, x, y, rows)
            return
        count = len(rows.rows)
        shrunk = torch.empty(count * self._width, dtype=torch.float32)
        library.lora(
            native.LORA.pack(
                x.data_ptr(), y.data_ptr(), rows.rows.data_ptr(), rows.adapter_indices.data_ptr(),
                self._adapter_structs.data_ptr(), self._part_structs.data_ptr(), shrunk.data_ptr(), x.stride(0),
                y.stride(0), count, self.depth, self.features, self._width, native.TYPES[self.dtype],
            )
        )  # fmt: skip


def lora_reference(adapters: Sequence[Sequence[LoraPart]], x: Tensor, y: Tensor, rows: LoraRows) -> None:
    """The formula in torch, row by row."""
    for row, adapter in zip(rows.rows.tolist(), rows.adapter_indices.tolist(), strict=True):
        for part in adapters[adapter]:
            columns = y[row, part.column : part.column + part.b.shape[1]]
            columns.copy_(columns.float() + (x[row].float() @ part.a.float().T) @ part.b.float())
