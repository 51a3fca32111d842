"""StoredWeight: one quantised weight of a checkpoint: the tensors that store it, and their layouts.

A weight [rows, columns] is stored as codes, scales and, depending on the method, zero points or the group of each
column. Each of these parts has an axis for the rows and an axis for the columns, unless it is the same for all rows or
all columns. Experts in one tensor are a weight [experts, columns, rows]. This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from coatcheck.workers.distributed.tensor_slice import TensorSlice


class Encoding(Enum):
    """How a weight is stored. decode_weight.py has the formulas."""

    PACKED_INT = "integers packed along the columns into int32"  # compressed-tensors
    INT8 = "int8"
    FLOAT8 = "float8 e4m3"
    AWQ = "4-bit integers, transposed, packed along the rows in AWQ's order"
    GPTQ = "integers, transposed, packed along the columns"
    FLOAT4 = "4-bit floats, two columns in a byte"  # NVFP4 and MXFP4 of linears
    MXFP4 = "experts of 4-bit floats with an exponent for 32 columns"
    NF4 = "indices into bitsandbytes' table of 16 values"


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimension `dim` of a stored tensor. One index covers `step` rows or columns of the weight."""

    dim: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The stored tensor `key`. `rows`, `columns`, `experts`: None if the tensor does not depend on them."""

    key: str
    rows: Axis | None = None
    columns: Axis | None = None
    experts: Axis | None = None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of `shape`. `parts`: by role: codes, scales, zeros, order, and NF4's others (see decode_weight.py).

    `block`: (rows, columns) that share a scale. `zero_offset`: added to stored zero points. `constants`: of NF4,
    (block, offset of the scales). `quantises_activations`: see QuantisedWeight.
    """

    shape: tuple[int, ...]
    encoding: Encoding
    parts: Mapping[str, StoredPart]
    bits: int = 0
    block: tuple[int, int] = (1, 1)
    zero_offset: int = 0
    constants: tuple[float, ...] = ()
    quantises_activations: bool = False

    def slice_parts(self, part: TensorSlice) -> dict[str, TensorSlice | None] | None:
        """{role: the slice of the stored tensor from which `part` of the weight can be decoded; None: the whole
        tensor}.

        Returns None if an edge of `part` cuts a packed element or a block, or if the encoding can only be decoded
        whole.
        """
        if self._axis(self.parts["codes"], part.dim) is None:
            return None
        edges = [edge for bounds in part.ranges for edge in bounds]
        size = self.shape[part.dim]
        block = self.block[part.dim] if len(self.shape) == 2 else 1
        if any(edge % block for edge in edges if edge != size):
            return None
        slices: dict[str, TensorSlice | None] = {}
        for role, stored in self.parts.items():
            axis = self._axis(stored, part.dim)
            if axis is None:
                slices[role] = None
            elif any(edge % axis.step for edge in edges if edge != size):
                return None
            else:
                ranges = tuple((first // axis.step, -(-last // axis.step)) for first, last in part.ranges)
                slices[role] = TensorSlice(axis.dim, ranges)
        return slices

    def _axis(self, part: StoredPart, dim: int) -> Axis | None:
        """The axis of `part` for dimension `dim` of the weight."""
        if len(self.shape) == 2:
            return (part.rows, part.columns)[dim]
        return (part.experts, part.columns, part.rows)[dim]
