"""TensorSlice: the part of a tensor that one rank holds."""

from dataclasses import dataclass
from typing import Self

Range = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The concatenation of `ranges` along `dim`. A fused QKV weight, for example, has a range for each of q, k and
    v."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Elements along `dim`."""
        return sum(stop - start for start, stop in self.ranges)

    def sliced_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this slice of a tensor of `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def intersect(self, start: int, stop: int) -> Self:
        """The part within [start, stop), with indices relative to `start`."""
        inside = ((max(a, start) - start, min(b, stop) - start) for a, b in self.ranges)
        return type(self)(self.dim, tuple((a, b) for a, b in inside if a < b))
