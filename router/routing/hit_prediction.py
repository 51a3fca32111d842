"""HitPrediction: the cached tokens that this router predicted, compared with those that the groups found.

Predictions of single prompts may be wrong: cached blocks may be evicted while a prompt waits, and other routers send
prompts too. If they are wrong for many prompts of a group, the index is wrong about its blocks: the group "diverges",
and a snapshot is needed.
"""

from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 32  # prompts that the running averages cover
_FEWEST: Final = 16  # prompts before a group can diverge
_TOLERATED: Final = 0.5  # mean error, as a share of the mean larger count


@dataclass(frozen=True, slots=True)
class HitPredictionStats:
    """Counts of one group since the start. `error_tokens`: sum of the absolute differences, prompt by prompt."""

    prompts: int
    foreseen_tokens: int
    found_tokens: int
    error_tokens: int
    divergences: int


@dataclass(slots=True)
class _Account:
    prompts: int = 0
    # Running averages per prompt, in tokens.
    error: float = 0.0  # |predicted - found|
    larger: float = 0.0  # max(predicted, found)


class HitPrediction:
    """One for a router."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._stats: dict[str, HitPredictionStats] = {}

    def record(self, group: str, predicted: int, found: int) -> bool:
        """Records one prompt's cached tokens. Returns True if the group diverges; its running averages then start
        again."""
        account = self._accounts.setdefault(group, _Account())
        account.prompts += 1
        account.error += (abs(predicted - found) - account.error) / min(account.prompts, _MEMORY)
        account.larger += (max(predicted, found) - account.larger) / min(account.prompts, _MEMORY)
        diverges = account.prompts >= _FEWEST and account.error > _TOLERATED * account.larger
        if diverges:
            self._accounts[group] = _Account()
        old = self.stats(group)
        self._stats[group] = HitPredictionStats(
            old.prompts + 1,
            old.foreseen_tokens + predicted,
            old.found_tokens + found,
            old.error_tokens + abs(predicted - found),
            old.divergences + diverges,
        )
        return diverges

    def stats(self, group: str) -> HitPredictionStats:
        return self._stats.get(group, HitPredictionStats(0, 0, 0, 0, 0))
