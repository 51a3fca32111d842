"""HitPrediction: the cached tokens that this router foresaw, against those that the groups found.

What was foreseen may be evicted while a prompt waits, and what another router sent may have come meanwhile, so single
prompts differ. A group whose prompts differ by much for long has another idea of its blocks than the index: `diverges`
says so, once, and then lets it prove itself anew. It does not know blocks, hashes or links.
"""

from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 32  # prompts that the running averages look back on
_FEWEST: Final = 16  # and that they need before they say anything
_TOLERATED: Final = 0.5  # of the larger of the two


@dataclass(frozen=True, slots=True)
class HitPredictionStats:
    """Since the start: prompts, tokens foreseen and found, the sum of the differences, and how often it diverged."""

    prompts: int
    foreseen_tokens: int
    found_tokens: int
    error_tokens: int
    divergences: int


@dataclass(slots=True)
class _Account:
    prompts: int = 0
    error: float = 0.0  # running averages, in tokens
    larger: float = 0.0


class HitPrediction:
    """`record` as groups report."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._stats: dict[str, HitPredictionStats] = {}

    def record(self, group: str, foreseen: int, found: int) -> bool:
        """One prompt's cached tokens. Returns whether the group now diverges, so that its blocks must be asked for."""
        account = self._accounts.setdefault(group, _Account())
        account.prompts += 1
        account.error += (abs(foreseen - found) - account.error) / min(account.prompts, _MEMORY)
        account.larger += (max(foreseen, found) - account.larger) / min(account.prompts, _MEMORY)
        diverges = account.prompts >= _FEWEST and account.error > _TOLERATED * account.larger
        if diverges:
            self._accounts[group] = _Account()
        old = self.stats(group)
        self._stats[group] = HitPredictionStats(
            old.prompts + 1,
            old.foreseen_tokens + foreseen,
            old.found_tokens + found,
            old.error_tokens + abs(foreseen - found),
            old.divergences + diverges,
        )
        return diverges

    def stats(self, group: str) -> HitPredictionStats:
        """One group's counts."""
        return self._stats.get(group, HitPredictionStats(0, 0, 0, 0, 0))
