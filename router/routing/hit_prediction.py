"""HitPrediction: the cached tokens that this router predicted, compared with the cached tokens that the groups found.

Predictions of single prompts may be wrong: cached blocks may be evicted while a prompt waits, and other routers send
prompts too. If they are wrong for many prompts of a group, the index is wrong about its blocks: the group "diverges",
and a snapshot is needed.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from coatcheck.proto.stubs.coatcheck_pb2 import CacheAudit

_AVERAGED_PROMPTS: Final = 32  # prompts that the running averages cover
_MIN_PROMPTS: Final = 16  # prompts before a group can diverge
_MAX_RELATIVE_ERROR: Final = 0.5  # mean error, as a share of the mean larger count


@dataclass(slots=True)
class _Averages:
    """Running averages of the last prompts of a group, in tokens per prompt."""

    prompts: int = 0
    error: float = 0.0  # |predicted - found|
    larger: float = 0.0  # max(predicted, found)


class HitPrediction:
    """One for a router. `audits`: counts of each group since the start."""

    def __init__(self) -> None:
        self.audits: defaultdict[str, CacheAudit] = defaultdict(CacheAudit)
        self._averages: defaultdict[str, _Averages] = defaultdict(_Averages)

    def record(self, group: str, predicted: int, found: int) -> bool:
        """Records one prompt's cached tokens. Returns True if the group diverges; its running averages then start
        again."""
        error = abs(predicted - found)
        averages = self._averages[group]
        averages.prompts += 1
        averages.error += (error - averages.error) / min(averages.prompts, _AVERAGED_PROMPTS)
        averages.larger += (max(predicted, found) - averages.larger) / min(averages.prompts, _AVERAGED_PROMPTS)
        diverges = averages.prompts >= _MIN_PROMPTS and averages.error > _MAX_RELATIVE_ERROR * averages.larger
        if diverges:
            del self._averages[group]
        audit = self.audits[group]
        audit.prompts += 1
        audit.predicted_tokens += predicted
        audit.found_tokens += found
        audit.error_tokens += error
        audit.divergences += diverges
        return diverges
