"""StragglerSignal: how many times as long as usual this group's steps take, whatever is in them.

    work     = of a step: Σ over its rows of tokens × (1 + context / crossover), in tokens of an empty context
    usual    = seconds of a step of that much work, with or without prompts: by powers of two, averaged over minutes
    slowness = Σ seconds / Σ usual seconds, over the last few seconds of steps

So long contexts, large batches and long prompts are no slowness: they are more work. What lasts becomes usual in time.
A machine that is throttled, swaps, or waits for a bad link shows here while its group still answers everybody. Pure but
for what it is told, times too. It does not know what anybody concludes from it.
"""

from math import exp, log
from typing import Final

from coatcheck.workers.core.step_plan import StepPlan

# Of steps, not of the clock: a group that has little to do is not judged by little.
_RECENT_SECONDS: Final = 4.0
_USUAL_SECONDS: Final = 600.0
_FEWEST_STEPS: Final = 20  # before it is known what is usual for so much work
# Longest that one step counts, unless it usually takes longer: a single pause is no slowness.
_LONGEST_PAUSE: Final = 2.0
_IDLE_SECONDS: Final = 10.0  # after which what was before does not count


class StragglerSignal:
    """`record` each step, `value` at any time; 1 is as usual, also while nothing is known."""

    def __init__(self, crossover: int) -> None:
        self._crossover = crossover
        self._usual: dict[tuple[bool, int], tuple[int, float]] = {}  # (prompts, log2 work) -> steps, log of seconds
        self._spent = self._expected = 0.0
        self._ended = 0.0

    @property
    def value(self) -> float:
        """Over the last few seconds of steps."""
        return self._spent / self._expected if self._spent > _RECENT_SECONDS / 2 else 1.0

    def record(self, plan: StepPlan, seconds: float, now: float) -> None:
        """One step that has just ended."""
        if not plan.rows:
            return
        if now - seconds - self._ended > _IDLE_SECONDS:
            self._spent = self._expected = 0.0
        self._ended = now
        attended = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in plan.rows)
        work = plan.num_tokens + attended / self._crossover
        kind = (any(row.num_tokens > 1 for row in plan.rows), int(log(max(work, 1.0), 2)))
        steps, usual = self._usual.get(kind, (0, 0.0))
        if steps >= _FEWEST_STEPS:
            counted = min(seconds, max(exp(usual), _LONGEST_PAUSE))
            kept = exp(-counted / _RECENT_SECONDS)
            self._spent = kept * self._spent + counted
            self._expected = kept * self._expected + exp(usual)
        weight = max(1 / (steps + 1), min(seconds / _USUAL_SECONDS, 1.0))
        self._usual[kind] = (steps + 1, usual + weight * (log(max(seconds, 1e-6)) - usual))
