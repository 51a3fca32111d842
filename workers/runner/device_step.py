"""DeviceStep: the LaunchedStep of one rank. Its kernels are queued on the device, and so are the copies to the host.

Log-probabilities are copied as tokens are: the copy is queued behind the kernels that compute them, and read in `wait`.
So a request for log-probabilities delays no launch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from coatcheck.kernels.sampling.logprobs import all_logprobs, logprobs
from coatcheck.proto.sampling import ALL_LOGPROBS, MAX_LOGPROBS
from coatcheck.workers.core.runner_protocol import CopyReport, StepResult
from coatcheck.workers.core.step_output import TokenLogprob
from coatcheck.workers.runner.host_transfer import HostCopy, upload

NONE_NAMED: Final[Mapping[int, Sequence[int]]] = MappingProxyType({})
_ALL_ROWS: Final = 8  # of which all log-probabilities are computed at once: 10 MB of a vocabulary of 152,000


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """Log-probabilities of R tokens: each token's own and its rank, and those of the `counts[r]` most likely tokens, of
    all tokens, or of those that the request names.

    Rows with more than MAX_LOGPROBS are computed by themselves, so that memory is bounded by what they ask for and not
    by their largest count times R: the largest step of the warm-up has MAX_LOGPROBS in every row.
    """

    _counts: Sequence[int]
    _ids: HostCopy  # int64 [R, 2 + k]: the token, its rank, the k most likely tokens; k: the largest narrow count
    _values: HostCopy  # float32 [R, 1 + k]
    _wide: dict[int, tuple[HostCopy, HostCopy]]  # by row: int64 ids and float32 values [1, counts[row]]
    _named: dict[int, tuple[Sequence[int], HostCopy]]  # by row: ids, float32 [ids]
    _all: list[HostCopy]  # float32 [rows whose count is ALL_LOGPROBS, vocab], in parts of _ALL_ROWS

    @classmethod
    def start(
        cls, logits: Tensor, token_ids: Tensor, counts: Sequence[int], named: Mapping[int, Sequence[int]] = NONE_NAMED
    ) -> "LogprobReport":
        """Queue the copy. `logits`: float32 [R, vocab], before bias, penalties and temperature. `token_ids`: int64 [R].
        Both may change afterwards. `named`: by row, ids whose log-probabilities are reported in place of the most
        likely ones."""
        counts = [0 if row in named else count for row, count in enumerate(counts)]
        narrow = max([0, *(count for count in counts if count <= MAX_LOGPROBS)])
        chosen, rank, top_ids, top = logprobs(logits, token_ids, narrow)
        ids = torch.cat((token_ids[:, None], rank[:, None], top_ids), dim=1)

        def copy_of(rows: Sequence[int]) -> Tensor:
            # Not a view: the kernel is compiled again for rows that do not begin at a multiple of 16 bytes.
            return logits[upload(rows, torch.int64, logits.device)]

        wide = {}
        for row, count in enumerate(counts):
            if count > MAX_LOGPROBS:
                _, _, row_ids, row_top = logprobs(copy_of([row]), token_ids[row : row + 1].clone(), count)
                wide[row] = HostCopy.start(row_ids), HostCopy.start(row_top)
        copies = {
            row: (wanted, HostCopy.start(all_logprobs(copy_of([row]))[0, upload(wanted, torch.int64, ids.device)]))
            for row, wanted in named.items()
        }
        rows = [row for row, count in enumerate(counts) if count == ALL_LOGPROBS]
        every = [
            HostCopy.start(all_logprobs(copy_of(rows[begin : begin + _ALL_ROWS])))
            for begin in range(0, len(rows), _ALL_ROWS)
        ]
        values = HostCopy.start(torch.cat((chosen[:, None], top), dim=1))
        return cls(counts, HostCopy.start(ids), values, wide, copies, every)

    def wait(self) -> list[TokenLogprob]:
        """Block until the copy is done. One entry for each token."""
        every = chain.from_iterable(part.wait_rows() for part in self._all)
        entries = []
        for row, (count, (token, rank, *top_ids), (chosen, *top)) in enumerate(
            zip(self._counts, self._ids.wait(), self._values.wait(), strict=True)
        ):
            if count == ALL_LOGPROBS:
                values = next(every)
                entries.append(TokenLogprob(token, float(values[token]), rank, (), values.astype("<f4").tobytes()))
                continue
            if row in self._wide:
                wide_ids, wide_values = self._wide[row]
                (top_ids,), (top,) = wide_ids.wait(), wide_values.wait()
            elif row in self._named:
                wanted, copied = self._named[row]
                top_ids, top, count = list(wanted), copied.wait(), len(wanted)
            entries.append(TokenLogprob(token, chosen, rank, tuple(zip(top_ids[:count], top[:count], strict=True))))
        return entries


@dataclass(slots=True)
class DeviceStep:
    """`sampled_rows`: the plan's row of each of `token_ids`. `logprobs`: (rows, report). `find_forced`: called once the
    tokens are on the host; returns `forced`. The rest: see StepResult."""

    num_rows: int
    sampled_rows: list[int]
    token_ids: HostCopy | None  # int64 [sampled rows]
    logprobs: tuple[list[int], LogprobReport] | None = None
    prompt_logprobs: dict[int, list[LogprobReport]] = field(default_factory=dict)
    copy_report: CopyReport | None = None
    failed: dict[int, str] = field(default_factory=dict)
    num_compiled: tuple[int, ...] | None = None
    embeddings: dict[int, HostCopy] = field(default_factory=dict)  # float32 [hidden_size] each
    find_forced: Callable[[], dict[int, list[int]]] = dict

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
            token_ids, row_logprobs, prompt_logprobs, self.copy_report, self.failed, self.num_compiled, embeddings,
            self.find_forced(),
        )  # fmt: skip
