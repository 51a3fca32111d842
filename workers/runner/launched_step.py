"""DeviceStep: what one rank has queued of a step, and how its results come to the host. It does not know the plan."""

from dataclasses import dataclass, field

from coatcheck.workers.core.copy_report import CopyReport
from coatcheck.workers.core.runner_protocol import StepResult
from coatcheck.workers.runner.host_transfer import Download
from coatcheck.workers.runner.logprob_report import LogprobReport


@dataclass(slots=True)
class DeviceStep:
    """A step whose kernels are queued; `wait` brings its tokens to the host."""

    num_rows: int
    sampled_rows: list[int]
    token_ids: Download | None  # int64 [sampled rows]
    logprobs: tuple[list[int], LogprobReport] | None = None  # of these rows
    prompt_logprobs: dict[int, list[LogprobReport]] = field(default_factory=dict)
    copies: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)
    grammars: tuple[int, ...] | None = None

    def wait(self) -> StepResult:
        """The step's tokens, one per row, -1 where none was sampled."""
        token_ids = [-1] * self.num_rows
        if self.token_ids is not None:
            for row, token in zip(self.sampled_rows, self.token_ids.wait(), strict=True):
                token_ids[row] = token
        logprobs = dict(zip(self.logprobs[0], self.logprobs[1].wait(), strict=True)) if self.logprobs else {}
        prompt_logprobs = {
            row: [one for part in parts for one in part.wait()] for row, parts in self.prompt_logprobs.items()
        }
        return StepResult(token_ids, logprobs, prompt_logprobs, self.copies, self.failed, self.grammars)
