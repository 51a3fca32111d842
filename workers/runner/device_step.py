"""DeviceStep: the LaunchedStep of one rank. Its kernels are queued on the device, and so are the copies to the host.

Log-probabilities are copied as tokens are: the copy is queued behind the kernels that compute them, and read in `wait`.
So a request for log-probabilities delays no launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coatcheck.kernels.sampling.logprobs import logprobs
from coatcheck.workers.core.runner_protocol import CopyReport, StepResult
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.runner.host_transfer import HostCopy


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Log-probabilities of R tokens: each token's own and its rank, and those of the `counts[r]` most likely tokens."""

    _counts: Sequence[int]
    _ids: HostCopy  # int64 [R, 2 + max(counts)]: the token, its rank, the most likely tokens
    _values: HostCopy  # float32 [R, 1 + max(counts)]

    @classmethod
    def start(cls, logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> "LogprobReport":
        """Queue the copy. `logits`: float32 [R, vocab], before bias, penalties and temperature. `token_ids`: int64 [R].
        Both may change afterwards."""
        chosen, rank, top_ids, top = logprobs(logits, token_ids, max(counts))
        ids = torch.cat((token_ids[:, None], rank[:, None], top_ids), dim=1)
        return cls(counts, HostCopy.start(ids), HostCopy.start(torch.cat((chosen[:, None], top), dim=1)))

    def wait(self) -> list[TokenLogprob]:
        """Block until the copy is done. One entry for each token."""
        return [
            TokenLogprob(token, chosen, rank, tuple(zip(top_ids[:count], top[:count], strict=True)))
            for count, (token, rank, *top_ids), (chosen, *top) in zip(
                self._counts, self._ids.wait(), self._values.wait(), strict=True
            )
        ]


@dataclass(slots=True)
class DeviceStep:
    """`sampled_rows`: the plan's row of each of `token_ids`. `logprobs`: (rows, report). The rest: see StepResult."""

    num_rows: int
    sampled_rows: list[int]
    token_ids: HostCopy | None  # int64 [sampled rows]
    logprobs: tuple[list[int], LogprobReport] | None = None
    prompt_logprobs: dict[int, list[LogprobReport]] = field(default_factory=dict)
    copy_report: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)
    num_compiled: tuple[int, ...] | None = None
    embeddings: dict[int, HostCopy] = field(default_factory=dict)  # float32 [hidden_size] each

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        token_ids = [-1] * self.num_rows
        if self.token_ids is not None:
            for row, token in zip(self.sampled_rows, self.token_ids.wait(), strict=True):
                token_ids[row] = token
        row_logprobs = dict(zip(self.logprobs[0], self.logprobs[1].wait(), strict=True)) if self.logprobs else {}
        prompt_logprobs = {
            row: [entry for part in parts for entry in part.wait()] for row, parts in self.prompt_logprobs.items()
        }
        embeddings = {row: copied.wait() for row, copied in self.embeddings.items()}
        return StepResult(
            token_ids, row_logprobs, prompt_logprobs, self.copy_report, self.failed, self.num_compiled, embeddings
        )
