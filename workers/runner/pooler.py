"""Pooler: the embedding of a prompt from the hidden states of the steps that compute it.

LAST: the hidden state of the prompt's last token. MEAN: the mean over all its tokens, added up in float32 over the
chunks of the prompt.
"""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from coatcheck.workers.core.request import Pooling
from coatcheck.workers.core.step_plan import NewSequence, ScheduledSequence
from coatcheck.workers.runner.host_transfer import HostCopy


class Pooler:
    """The sequences of one rank whose prompt is pooled."""

    def __init__(self) -> None:
        self._pooled: dict[int, NewSequence] = {}  # by slot
        self._sums: dict[int, Tensor] = {}  # by slot: float32 [hidden_size], of the prompt tokens so far

    def set_sequence(self, new: NewSequence) -> None:
        """Replace what the slot had by a new sequence."""
        self._pooled.pop(new.slot, None)
        self._sums.pop(new.slot, None)
        if new.pooling is not Pooling.NONE:
            self._pooled[new.slot] = new

    def pools(self, row: ScheduledSequence) -> bool:
        """Whether the row has prompt tokens whose hidden states are needed."""
        new = self._pooled.get(row.slot)
        return new is not None and row.start < new.prompt_len

    def pool(self, rows: Sequence[ScheduledSequence], hidden: Tensor) -> dict[int, HostCopy]:
        """Add the step's hidden states, [T, hidden_size] of all tokens of the rows. Return the embedding, float32
        [hidden_size], of each row that contains the last token of its prompt."""
        embeddings: dict[int, HostCopy] = {}
        firsts = accumulate((row.num_tokens for row in rows), initial=0)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=False)):
            if not self.pools(row):
                continue
            new = self._pooled[row.slot]
            count = min(row.num_tokens, new.prompt_len - row.start)
            is_complete = row.start + count == new.prompt_len
            states = hidden[first : first + count]
            if new.pooling is Pooling.MEAN:
                total = states.float().sum(dim=0)
                if row.slot in self._sums:
                    total += self._sums[row.slot]
                self._sums[row.slot] = total
                pooled = total / new.prompt_len
            else:
                pooled = states[-1].float()
            if is_complete:
                embeddings[index] = HostCopy.start(pooled)
        return embeddings
