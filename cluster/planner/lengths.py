"""LengthDistribution: sequence lengths, and how many sequences of these lengths fit into a KV pool.

The lengths come from a trace of real requests, or are evenly spread.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from coatcheck.cluster.benchmark.request_trace import read_trace
from coatcheck.proto.errors import InvalidConfig

_MAX_LENGTHS: Final = 100_000  # of an even spread


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """`counts`: (tokens in a sequence, number of such sequences). `left_out`: sequences longer than allowed."""

    counts: tuple[tuple[int, int], ...]
    source: str
    left_out: int = 0

    @classmethod
    def evenly_spread(cls, longest: int) -> Self:
        """Lengths from 1 to `longest`, each once. Beyond 100,000 lengths: evenly spaced ones."""
        step = -(-longest // _MAX_LENGTHS) | 1  # odd, so that no block size divides it
        return cls(tuple((length, 1) for length in range(1, longest + 1, step)), f"even from 1 to {longest:,}")

    @classmethod
    def of(cls, lengths: Iterable[int], longest: int, source: str) -> Self:
        """Raise InvalidConfig if no length is within `longest`."""
        every = Counter(length for length in lengths if length > 0)
        kept = sorted((length, count) for length, count in every.items() if length <= longest)
        if not kept:
            raise InvalidConfig(f"{source} holds no sequence of 1 to {longest:,} tokens; raise --context")
        return cls(tuple(kept), source, every.total() - sum(count for _, count in kept))

    @classmethod
    def read(cls, trace: Path, longest: int) -> Self:
        """The length of a sequence is that of prompt and answer together."""
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
        """Mean number of blocks of a sequence at its full length."""
        return sum(-(-length // block_size) * count for length, count in self.counts) / self.number

    def waste(self, block_size: int) -> float:
        """Share of the allocated slots that hold no token: the unused rest of each last block."""
        return 1 - self.mean / (self.mean_blocks(block_size) * block_size)

    def fit_paged(self, num_blocks: int, block_size: int) -> int:
        """Mean number of sequences at full length that a paged pool holds."""
        return int(num_blocks / self.mean_blocks(block_size))

    def fit_reserved(self, num_blocks: int, block_size: int, longest: int) -> int:
        """Number of sequences that the same memory holds if each reserves `longest` tokens."""
        return num_blocks * block_size // longest
