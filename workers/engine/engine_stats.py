"""Throughput: what an engine has done and how fast it does it lately; what routers weigh groups by."""

from collections import Counter
from collections.abc import Mapping
from typing import TypedDict

from coatcheck.workers.core.cache_reasons import MissReason
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import StepPlan

_MEMORY = 0.9  # of the running averages, per step


class ThroughputCounts(TypedDict):
    """The part of EngineStats that is counted here."""

    prompt_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    prefix_misses: Mapping[MissReason, int]
    generated_tokens: int
    steps: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    step_seconds: float


class Throughput:
    """Counters since the start; running averages of prefill rate and of the seconds of a decode-only step."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_device_tokens = 0
        self.cached_host_tokens = 0
        self.prefix_misses: Counter[MissReason] = Counter()
        self.generated_tokens = 0
        self.steps = 0
        self.prefill_seconds = 0.0
        self.prefill_tokens_per_second = 0.0
        self.step_seconds = 0.0

    def admitted(self, sequence: Sequence) -> None:
        """Counts a sequence's prompt, once; forks share their leader's."""
        if sequence.leader is None:
            self.prompt_tokens += sequence.prompt_len
            self.cached_device_tokens += max(sequence.cached_device_tokens, 0)
            self.cached_host_tokens += sequence.cached_host_tokens
            if sequence.miss is not None:
                self.prefix_misses[sequence.miss.reason] += 1

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Takes one step's duration into the averages."""
        self.steps += 1
        if not plan.rows:
            return
        prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self.prefill_seconds += seconds if prefill else 0.0
        if not prefill:
            self.step_seconds = self._mix(self.step_seconds, seconds)
        elif prefill >= 32:  # shorter ones measure the step's overhead
            beside = max(seconds - self.step_seconds * (len(plan.rows) > 1), seconds / 10)
            self.prefill_tokens_per_second = self._mix(self.prefill_tokens_per_second, prefill / beside)

    def counts(self) -> ThroughputCounts:
        """Everything, as EngineStats names it."""
        return ThroughputCounts(
            prompt_tokens=self.prompt_tokens,
            cached_device_tokens=self.cached_device_tokens,
            cached_host_tokens=self.cached_host_tokens,
            prefix_misses=dict(self.prefix_misses),
            generated_tokens=self.generated_tokens,
            steps=self.steps,
            prefill_seconds=self.prefill_seconds,
            prefill_tokens_per_second=self.prefill_tokens_per_second,
            step_seconds=self.step_seconds,
        )

    @staticmethod
    def _mix(average: float, sample: float) -> float:
        return sample if average == 0.0 else _MEMORY * average + (1 - _MEMORY) * sample
