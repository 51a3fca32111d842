"""TensorSlice: which part of a tensor one rank holds: index ranges along one dimension, joined in order.

Pure arithmetic. It does not know why a tensor is cut so; sharding.py does.
"""

from dataclasses import dataclass
from typing import Self

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The concatenation along `dim` of the half-open `ranges`."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Elements along `dim` that remain."""
        return sum(stop - start for start, stop in self.ranges)

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def window(self, start: int, stop: int) -> Self:
        """The part that falls in [start, stop), counted from `start`."""
        inside = ((max(a, start) - start, min(b, stop) - start) for a, b in self.ranges)
        return type(self)(self.dim, tuple((a, b) for a, b in inside if a < b))

    def along(self, dim: int) -> Self:
        """The same ranges along another dimension."""
        return type(self)(dim, self.ranges)
