"""TokenBudget: how many prompt tokens one step may still compute.

While sequences decode, a chunk is charged for its attention over the tokens before it, in tokens of an empty context:

    price(start, count) = count * (1 + (start + count / 2) / crossover)

so that the last chunk of a long prompt delays the decodes no longer than the first. A step without decodes takes as
many tokens as fit.
"""

from dataclasses import dataclass
from typing import Final

_SMALLEST_CHUNK: Final = 16  # a smaller chunk costs little more than the overhead of its step


@dataclass(slots=True)
class TokenBudget:
    """`left`: tokens. `crossover`: the context length at which a token's attention costs as much as all else."""

    left: float
    crossover: int
    beside_decodes: bool

    @property
    def is_spent(self) -> bool:
        return self.left < 1

    def take_tokens(self, start: int, wanted: int) -> int:
        """Return how many of `wanted` tokens from position `start` this step computes, and charge for them."""
        affordable = self.left
        if self.beside_decodes:
            affordable = min(max(self.left / (1 + start / self.crossover), _SMALLEST_CHUNK), self.left)
        count = min(wanted, int(affordable))
        self.left -= count * (1 + (start + count / 2) / self.crossover) if self.beside_decodes else count
        return count
