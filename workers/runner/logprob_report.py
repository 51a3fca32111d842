"""LogprobReport: log-probabilities of some rows' tokens, on their way from the device to the host.

They travel as a step's tokens do: queued behind what computes them and read when the step is waited for, so that a
request for them holds up no launch. It does not know requests, nor which step it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coatcheck.kernels.sampling.logprobs import logprobs
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.runner.host_transfer import Download


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """One token a row, with its rank, and the counts[r] most likely ones beside it."""

    _counts: Sequence[int]
    _ids: Download  # int64 [R, 2 + k]: the token, its rank, the most likely ones
    _values: Download  # float32 [R, 1 + k]

    @classmethod
    def start(cls, logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> "LogprobReport":
        """logits: float32 [R, V], as the model gave them: before bias, penalties and temperature; token_ids: int64 [R].
        Both may change once this returns."""
        chosen, rank, top_ids, top = logprobs(logits, token_ids, max(counts))
        ids = torch.cat((token_ids[:, None], rank[:, None], top_ids), dim=1)
        return cls(counts, Download.start(ids), Download.start(torch.cat((chosen[:, None], top), dim=1)))

    def wait(self) -> list[TokenLogprob]:
        """One a row, once they are there."""
        return [
            TokenLogprob(token, chosen, rank, tuple(zip(top_ids[:count], top[:count], strict=True)))
            for count, (token, rank, *top_ids), (chosen, *top) in zip(
                self._counts, self._ids.wait(), self._values.wait(), strict=True
            )
        ]
