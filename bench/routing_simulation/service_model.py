"""ServiceModel, the speed of a simulated group; SimulatedRequest, a request of the trace while a group works on it.

A step takes a base time, a share for each sequence that decodes and for the context it reads, and the prompt
tokens computed in it at the prefill rate.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Self

BLOCK = 512


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Near a 70B model on four H100: seconds, tokens, and blocks of 512 tokens."""

    blocks: int = 3000
    host_blocks: int = 0
    prefill_rate: float = 10_000.0
    restore_rate: float = 250_000.0
    step_base: float = 0.012
    step_per_sequence: float = 0.0001
    step_per_context_token: float = 35e-9
    chunk: int = 2048
    max_sequences: int = 256
    report_seconds: float = 0.1

    def slowed(self, factor: float) -> Self:
        """The same group, `factor` times as slow."""
        return replace(
            self,
            prefill_rate=self.prefill_rate / factor,
            restore_rate=self.restore_rate / factor,
            step_base=self.step_base * factor,
            step_per_sequence=self.step_per_sequence * factor,
            step_per_context_token=self.step_per_context_token * factor,
        )

    def step(self, sequences: int, context: int) -> float:
        """Seconds of a step that decodes `sequences` sequences of `context` tokens in all, and computes no prompt."""
        return self.step_base + self.step_per_sequence * sequences + self.step_per_context_token * context

    def work(self, prompt: float, restored: float, context: int, output: int) -> float:
        """Seconds of a group's time that a request takes while the group is never idle."""
        prefill = prompt / self.prefill_rate + prompt / self.chunk * self.step_base + restored / self.restore_rate
        return prefill + output * (self.step_per_sequence + self.step_per_context_token * context)


@dataclass(slots=True)
class SimulatedRequest:
    """One request of the trace. `chain`: hashes of its prompt's full blocks."""

    at: float
    prompt: int
    output: int
    chain: tuple[bytes, ...]
    group: str = ""
    estimated_prefill: int = 0  # prompt tokens to compute, as estimated at its arrival
    remaining: int = 0  # prompt tokens still to compute
    cached: int = 0
    restored: int = 0
    unregistered: int = 0  # allocated blocks without a hash
    first_token: float = math.nan
    ended: float = math.nan
    held: list[bytes] = field(default_factory=list)
    to_register: frozenset[bytes] = frozenset()  # blocks that its prefill will register
