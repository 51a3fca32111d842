"""CopyCost and CopyTrials: which copies between the tiers are made.

CopyCost compares the measured time to copy a block between the tiers with the time to compute it again. It decides
whether to restore or recompute a prefix, whether to demote or drop an evicted block, which sequence is the cheapest to
preempt, and how many blocks a step copies. A copy that has not been measured (0) counts as free, so that the first
copies are made and measured.
"""

from dataclasses import dataclass
from typing import Final

from coatcheck.workers.core.runner_protocol import CopyReport

# The share of a decode step's time that copies may take. 15% raises the p99 of the inter-token latency 1.4 times, 25%
# raises it 1.5 times (bench/LOG.md).
_SHARE_BESIDE_DECODES: Final = 0.15
# The seconds of copies in a step without decodes. A longer step would delay a request that arrives meanwhile.
_MAX_SECONDS_ALONE: Final = 0.02
_UNMEASURED_BLOCKS_PER_STEP: Final = 8
_TRIAL_EVERY: Final = 31


@dataclass(slots=True)
class CopyCost:
    """All times are in seconds; 0 if not measured. `demote`, `restore`: of one block on the slowest rank. `prefill`: of
    one token. `step`: of a decode step."""

    block_size: int
    demote: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    step: float = 0.0

    def update(self, copy_report: CopyReport | None, *, tokens_per_second: float, step: float) -> None:
        """Record how fast ranks copy, prefill (`tokens_per_second`) and decode (`step`, in seconds). `copy_report`:
        None without a new measurement."""
        self.prefill = 1 / tokens_per_second if tokens_per_second else 0.0
        self.step = step
        if copy_report is not None:
            self.demote, self.restore = copy_report.demote_seconds, copy_report.restore_seconds

    def is_restore_faster(self, num_blocks: int, *, num_queued: int, with_decodes: bool) -> bool:
        """Whether restoring `num_blocks` blocks, after the `num_queued` queued ones, takes less time than computing
        them."""
        if not self.prefill:
            return True
        seconds = (num_queued + num_blocks) * self.restore
        if with_decodes:  # copies get a share of each step, and the restored sequence starts with the next step
            seconds = seconds / _SHARE_BESIDE_DECODES + self.step
        return seconds < num_blocks * self.block_size * self.prefill

    @property
    def is_demotion_worthwhile(self) -> bool:
        """Whether copying a block out and back takes less time than computing it."""
        return not self.prefill or self.demote + self.restore < self.block_size * self.prefill

    def recovery_seconds(self, num_tokens: int) -> float:
        """The time to get the KV of `num_tokens` back after a preemption, by the faster way."""
        by_copy = num_tokens // self.block_size * (self.demote + self.restore)
        tail = num_tokens % self.block_size * self.prefill
        return min(by_copy + tail, num_tokens * self.prefill)

    def max_blocks_per_step(self, *, with_decodes: bool) -> int:
        """The number of blocks that a step may copy."""
        block = max(self.demote, self.restore)
        if not block:
            return _UNMEASURED_BLOCKS_PER_STEP
        seconds = self.step * _SHARE_BESIDE_DECODES if with_decodes and self.step else _MAX_SECONDS_ALONE
        return max(1, int(seconds / block))


class CopyTrials:
    """Counts the copies in one direction that cost too much. Every 31st in a row is a trial: it is made nonetheless.
    Otherwise no copy would be measured again, and a cost that was measured in a bad moment would never change."""

    def __init__(self) -> None:
        self._num_rejected = 0

    @property
    def is_due(self) -> bool:
        """Whether the next copy that costs too much is made."""
        return self._num_rejected >= _TRIAL_EVERY - 1

    def count_rejected(self) -> None:
        self._num_rejected += 1

    def count_copy(self) -> None:
        """Begin a new row: a copy is made, and measured."""
        self._num_rejected = 0
