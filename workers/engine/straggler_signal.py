"""StragglerSignal: the ratio of a group's step time to the usual time of steps with the same amount of work.

    work     = Σ over the sequences of a step: tokens × (1 + context / crossover)
    usual    = the geometric mean of the seconds of steps with this much work (by powers of two), over minutes of steps.
               Steps with prompts and steps without have means of their own
    slowness = Σ seconds / Σ usual seconds, over the last few seconds of steps

Long contexts, large batches and long prompts are more work, not slowness. A slowdown that lasts for minutes becomes
usual. The signal finds a machine that is throttled, swaps or has a bad link while its group still answers.
"""

from math import exp, log
from typing import Final

from coatcheck.workers.core.step_plan import StepPlan

# Time constants of the averages of recent and of usual steps. In seconds spent in steps, not of the clock, so that an
# idle group is not judged by a few steps.
_RECENT_SECONDS: Final = 4.0
_USUAL_SECONDS: Final = 600.0
_FEWEST_STEPS: Final = 20  # steps with an amount of work before its usual seconds are known
# A longer step counts as this many seconds, unless such steps usually take longer: a single pause is no slowness.
_LONGEST_PAUSE: Final = 2.0
_IDLE_SECONDS: Final = 10.0  # a longer time without a step resets the slowness


class StragglerSignal:
    """`crossover`: the context length in tokens at which attention takes as long as the linears."""

    def __init__(self, crossover: int) -> None:
        self._crossover = crossover
        # By bucket, which is (whether the step has prompts, log2 of its work): number of steps, mean log of seconds.
        self._usual: dict[tuple[bool, int], tuple[int, float]] = {}
        self._spent = self._expected = 0.0
        self._ended_at = 0.0

    @property
    def slowness(self) -> float:
        """Recent step time over usual step time. 1 is usual. Also 1 until there were enough recent steps."""
        return self._spent / self._expected if self._spent > _RECENT_SECONDS / 2 else 1.0

    def record_step(self, plan: StepPlan, seconds: float, now: float) -> None:
        """Record a step that took `seconds` and ended at `now`."""
        if not plan.scheduled:
            return
        if now - seconds - self._ended_at > _IDLE_SECONDS:
            self._spent = self._expected = 0.0
        self._ended_at = now
        attended = sum(one.num_tokens * (one.start + one.num_tokens / 2) for one in plan.scheduled)
        work = plan.num_tokens + attended / self._crossover
        bucket = (any(one.num_tokens > 1 for one in plan.scheduled), int(log(max(work, 1.0), 2)))
        steps, usual = self._usual.get(bucket, (0, 0.0))
        if steps >= _FEWEST_STEPS:
            counted = min(seconds, max(exp(usual), _LONGEST_PAUSE))
            kept = exp(-counted / _RECENT_SECONDS)
            self._spent = kept * self._spent + counted
            self._expected = kept * self._expected + exp(usual)
        weight = max(1 / (steps + 1), min(seconds / _USUAL_SECONDS, 1.0))
        self._usual[bucket] = (steps + 1, usual + weight * (log(max(seconds, 1e-6)) - usual))
