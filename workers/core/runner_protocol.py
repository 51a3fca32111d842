"""What an engine needs of whoever computes its steps: the seam between deciding and computing.

It does not know whether one process computes or many, nor on what.
"""

from dataclasses import dataclass, field
from typing import Protocol

from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.core.step_plan import StepPlan


@dataclass(slots=True)
class StepResult:
    """What the ranks report of one step: a token per row that samples, in row order (-1 for the others).

    `logprobs`, `prompt_logprobs` and `failed` are keyed by row index, and only there when asked for or when there are
    any. `copies` is there while copies between the tiers are under way, `grammars` (of each lane, how many of all that
    were announced are ready) while any is being compiled.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    copies: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)  # rows that cannot go on, and why
    grammars: tuple[int, ...] | None = None


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def wait(self) -> StepResult:
        """Blocks until the step's tokens are on the host."""


class Runner(Protocol):
    """Computes steps in the order in which they are launched: the one seam where tests put a fake."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step; the plan is not kept."""
