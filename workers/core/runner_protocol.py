"""Runner: the interface through which the engine has its steps computed, in one process or many. Tests use a fake."""

from dataclasses import dataclass, field
from typing import Protocol

from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.core.step_plan import StepPlan


@dataclass(slots=True)
class StepResult:
    """What the ranks report of one step.

    `token_ids`: one for each scheduled sequence; -1 for those that do not sample.
    `logprobs`, `prompt_logprobs`: by index in `scheduled`, for sequences that asked for them.
    `failed`: by index in `scheduled`, why the sequence cannot continue.
    `copies`: set while copies between tiers are in progress.
    `num_compiled`: set while grammars are being compiled. For each compile queue, how many of the grammars sent since
    the start are compiled on every rank.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    copies: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)
    num_compiled: tuple[int, ...] | None = None


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. The runner does not keep `plan`."""
