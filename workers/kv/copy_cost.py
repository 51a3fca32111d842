"""CopyCost: what moving a block between the tiers costs beside computing it again, as measured lately.

Pure: a scheduler asks it whether a prefix is restored or recomputed, whether an evicted block is worth keeping, whose
preemption loses least, and how many blocks a step may move. What has not been measured yet (0) counts as free of
charge on the copying side, so that the first copies are made, and measured. It does not know blocks or requests.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

from coatcheck.workers.core.copy_report import CopyReport

_SHARE_BESIDE_DECODES: Final = 0.15  # of a decode step's time: what copies may add to other streams' waits
_ALONE_SECONDS: Final = 0.02  # a longer step would keep a request that arrives meanwhile waiting
_UNMEASURED_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds: a block's way out and back on the slowest rank, a token's prefill, a decode step; 0 is not measured."""

    block_size: int
    demote: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    step: float = 0.0

    def now(self, copies: CopyReport | None, *, tokens_per_second: float, step: float) -> Self:
        """The prices after a step, by the rate of prefill; None where the ranks have said nothing new of copies."""
        measured = replace(self, prefill=1 / tokens_per_second if tokens_per_second else 0.0, step=step)
        if copies is None:
            return measured
        return replace(measured, demote=copies.demote_seconds, restore=copies.restore_seconds)

    def restores(self, num_blocks: int, *, queued: int, beside_decodes: bool) -> bool:
        """Whether so many blocks, behind those already queued, are here sooner than they are computed again."""
        if not self.prefill:
            return True
        seconds = (queued + num_blocks) * self.restore
        if beside_decodes:  # it has only its share of each step, and the tokens after it wait for the step to end
            seconds = seconds / _SHARE_BESIDE_DECODES + self.step
        return seconds < num_blocks * self.block_size * self.prefill

    @property
    def keeps(self) -> bool:
        """Whether a block that leaves the device is worth its way out and back."""
        return not self.prefill or self.demote + self.restore < self.block_size * self.prefill

    def loss(self, num_tokens: int) -> float:
        """Seconds that it takes to have so many tokens' blocks back, by whichever way is cheaper."""
        by_copy = num_tokens // self.block_size * (self.demote + self.restore)
        tail = num_tokens % self.block_size * self.prefill
        return min(by_copy + tail, num_tokens * self.prefill)

    def blocks_per_step(self, *, beside_decodes: bool) -> int:
        """How many blocks a step may move without its decodes, or a request that arrives meanwhile, noticing much."""
        block = max(self.demote, self.restore)
        if not block:
            return _UNMEASURED_BLOCKS
        seconds = self.step * _SHARE_BESIDE_DECODES if beside_decodes and self.step else _ALONE_SECONDS
        return max(1, int(seconds / block))
