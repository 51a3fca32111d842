"""TokenBudget: how much prefill one step may still take on.

While sequences decode, a chunk is priced with its attention over what came before it, in tokens of an empty context:

    price(start, count) = count * (1 + (start + count / 2) / crossover)

so that the thousandth chunk of a long prompt holds the decodes up no longer than the first. Alone, a step takes as
many tokens as fit. It does not know blocks or slots.
"""

from dataclasses import dataclass

_SMALLEST_CHUNK = 16  # below this a chunk costs its step's overhead and little else


@dataclass(slots=True)
class TokenBudget:
    """`left` in tokens; `crossover`: the context at which attention costs a token as much as all else does."""

    left: float
    crossover: int
    beside_decodes: bool

    @property
    def is_spent(self) -> bool:
        """Whether not even one token is left."""
        return self.left < 1

    def take(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` on this step computes; takes their price."""
        affordable = self.left
        if self.beside_decodes:
            affordable = min(max(self.left / (1 + start / self.crossover), _SMALLEST_CHUNK), self.left)
        count = min(wanted, int(affordable))
        self.left -= count * (1 + (start + count / 2) / self.crossover) if self.beside_decodes else count
        return count
