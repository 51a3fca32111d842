"""StepStatistics: an engine's counters since its start, and its measured speed. Load reports carry both to routers."""

from collections import Counter
from typing import Final

from coatcheck.workers.core.cache_reasons import MissReason
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.engine.straggler_signal import StragglerSignal

_OLD_WEIGHT: Final = 0.9  # the weight of the old value in a running average, per step
_SHORTEST_PREFILL: Final = 32  # tokens; a shorter prefill takes mostly the overhead of its step, and is not measured


class StepStatistics:
    """Counters since the start, running averages of the prefill rate and of the seconds of a decode-only step, and
    the slowness of recent steps (see StragglerSignal)."""

    def __init__(self, attention_crossover: int) -> None:
        self.prefill_tokens_per_second = 0.0
        self.step_seconds = 0.0
        self.prompt_tokens = self.cached_device_tokens = self.cached_host_tokens = self.generated_tokens = 0
        self.prefix_misses: Counter[MissReason] = Counter()
        self.steps = 0
        self.prefill_seconds = 0.0
        self._straggler = StragglerSignal(attention_crossover)

    @property
    def slowness(self) -> float:
        return self._straggler.slowness

    def count_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has its first token. No effect if its `prompt_source` computed it."""
        if sequence.prompt_source is None:
            self.prompt_tokens += sequence.prompt_len
            self.cached_device_tokens += max(sequence.cached_device_tokens, 0)
            self.cached_host_tokens += sequence.cached_host_tokens
            if sequence.miss is not None:
                self.prefix_misses[sequence.miss.reason] += 1

    def record_step(self, plan: StepPlan, num_prefill_tokens: int, seconds: float, now: float) -> None:
        """Record a step that took `seconds` and ended at `now`."""
        self.steps += 1
        self._straggler.record_step(plan, seconds, now)
        if not plan.scheduled:
            return
        if not num_prefill_tokens:
            self.step_seconds = _average(self.step_seconds, seconds)
            return
        self.prefill_seconds += seconds
        if num_prefill_tokens >= _SHORTEST_PREFILL:
            prefill_seconds = max(seconds - self.step_seconds * (len(plan.scheduled) > 1), seconds / 10)
            self.prefill_tokens_per_second = _average(
                self.prefill_tokens_per_second, num_prefill_tokens / prefill_seconds
            )


def _average(average: float, sample: float) -> float:
    """The running average with one more sample; the first sample replaces the initial 0."""
    return sample if average == 0.0 else _OLD_WEIGHT * average + (1 - _OLD_WEIGHT) * sample
