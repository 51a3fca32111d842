"""LengthDistribution: how long sequences get, and how many fit into a pool of blocks or of longest slots.

From a trace of real requests, or evenly spread. Pure counting: it does not know what a token takes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from coatcheck.cluster.benchmark.request_trace import read_trace
from coatcheck.proto.errors import InvalidConfig

_SPREAD: Final = 100_000  # lengths, at most


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """`counts`: (tokens of a whole sequence, how many are so long). `left_out` were longer than allowed."""

    counts: tuple[tuple[int, int], ...]
    source: str
    left_out: int = 0

    @classmethod
    def spread(cls, longest: int) -> Self:
        """Lengths from 1 on, equally often: all, or evenly chosen where they are many."""
        step = -(-longest // _SPREAD) | 1  # odd, so that no block size divides it
        return cls(tuple((length, 1) for length in range(1, longest + 1, step)), f"even from 1 to {longest:,}")

    @classmethod
    def of(cls, lengths: Iterable[int], longest: int, source: str) -> Self:
        """Raises InvalidConfig where none is within `longest`."""
        every = Counter(length for length in lengths if length > 0)
        kept = sorted((length, count) for length, count in every.items() if length <= longest)
        if not kept:
            raise InvalidConfig(f"{source} holds no sequence of 1 to {longest:,} tokens; raise --context")
        return cls(tuple(kept), source, every.total() - sum(count for _, count in kept))

    @classmethod
    def read(cls, trace: Path, longest: int) -> Self:
        """Prompt and answer of each request together."""
        entries = read_trace(trace)
        return cls.of((entry.input_len + entry.output_len for entry in entries), longest, trace.name)

    @property
    def number(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.counts)

    @property
    def mean(self) -> float:
        return self.tokens / self.number

    @property
    def longest(self) -> int:
        return self.counts[-1][0]

    def mean_blocks(self, block_size: int) -> float:
        """Blocks that a sequence takes, on average, when it has reached its length."""
        return sum(-(-length // block_size) * count for length, count in self.counts) / self.number

    def waste(self, block_size: int) -> float:
        """The share of taken slots that hold no token: the rest of each last block."""
        return 1 - self.mean / (self.mean_blocks(block_size) * block_size)

    def paged(self, num_blocks: int, block_size: int) -> int:
        """Sequences at their full length that a pool of blocks holds, on average."""
        return int(num_blocks / self.mean_blocks(block_size))

    def reserved(self, num_blocks: int, block_size: int, longest: int) -> int:
        """Sequences that the same memory holds when each is given room for the longest at once."""
        return num_blocks * block_size // longest
