"""Runner: the interface through which the engine has its steps computed, in one process or many. Tests use a fake."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.core.step_plan import StepPlan


class PeerLost(RuntimeError):
    """Another rank has died or did not answer a collective in time. The rank that raises this has not failed itself,
    and no request that it computes is the cause."""


class CopyStatus(IntEnum):
    """The status of one copy between the tiers. A group's status is the minimum over its ranks."""

    IN_PROGRESS = 0
    CORRUPT = 1  # the checksum of the bytes read is not that of the bytes written
    DONE = 2


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The progress of the copies between the tiers, over all ranks of a group.

    `statuses`: of every planned copy that no earlier report gave as CORRUPT or DONE, oldest first.
    `demote_seconds`, `restore_seconds`: recent time per block on the slowest rank; 0 before the first such copy.
    """

    statuses: tuple[CopyStatus, ...]
    demote_seconds: float
    restore_seconds: float


@dataclass(slots=True)
class StepResult:
    """What the ranks report of one step.

    `token_ids`: one for each scheduled sequence; -1 for those that do not sample.
    `logprobs`, `prompt_logprobs`: by index in `scheduled`, for sequences that asked for them.
    `embeddings`: by index in `scheduled`, of the prompts whose last token this step has computed.
    `forced`: by index in `scheduled`, tokens of the text that the sequence's grammar forces after this step's tokens.
    `failed`: by index in `scheduled`, why the sequence cannot continue.
    `copy_report`: set while copies between tiers are in progress.
    `num_compiled`: set while grammars are being compiled. For each compile queue, how many of the grammars sent since
    the start are compiled on every rank.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    copy_report: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)
    num_compiled: tuple[int, ...] | None = None
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    forced: dict[int, list[int]] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. The runner does not keep `plan`."""
