"""TokenConstraints: requests that forbid tokens, or force them: allowed_token_ids, bad token ids, reasoning limits.

What is forbidden or forced depends on the sequence's tokens and the position alone, so it is the same after a failover
or a preemption. The tokens are compared on the device, so no step waits for the tokens of the step before.
"""

import math

import torch
from torch import Tensor

from coatcheck.proto.sampling import ReasoningLimit
from coatcheck.workers.core.step_plan import NewSequence
from coatcheck.workers.runner.host_transfer import upload


class TokenConstraints:
    """The constraints of one rank's slots."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._constrained: dict[int, NewSequence] = {}  # by slot
        self._allowed: dict[int, Tensor] = {}  # by slot: int64 [n], the allowed ids

    def set_sequence(self, new: NewSequence) -> None:
        """Replace the constraints of the slot by those of a new sequence."""
        params, slot = new.sampling, new.slot
        self._constrained.pop(slot, None)
        self._allowed.pop(slot, None)
        if params.allowed_token_ids or params.bad_token_ids or params.reasoning_limit is not None:
            self._constrained[slot] = new
        if params.allowed_token_ids:
            self._allowed[slot] = upload(params.allowed_token_ids, torch.int64, self._device)

    def apply(self, logits: Tensor, slots: list[int], positions: list[int], token_ids: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. Shapes: see Sampler.sample_tokens."""
        if not self._constrained:
            return
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            new = self._constrained.get(slot)
            if new is None:
                continue
            output = token_ids[slot, new.prompt_len : position]
            if slot in self._allowed:
                self._allow_only(logits[row], self._allowed[slot])
            if new.sampling.bad_token_ids:
                self._forbid_bad(logits[row], output, new.sampling.bad_token_ids)
            if new.sampling.reasoning_limit is not None:
                self._limit_reasoning(logits[row], output, new.sampling.reasoning_limit)

    def _allow_only(self, logits: Tensor, allowed: Tensor) -> None:
        kept = logits[allowed]
        logits.fill_(-math.inf)
        logits[allowed] = kept

    def _forbid_bad(self, logits: Tensor, output: Tensor, bad: tuple[tuple[int, ...], ...]) -> None:
        """Forbid the last token of each sequence whose other tokens are the last of `output`, int32 [num_outputs]."""
        for length in {len(sequence) for sequence in bad if len(sequence) <= len(output) + 1}:
            sequences = upload([one for one in bad if len(one) == length], torch.int64, self._device)
            begun = (sequences[:, :-1] == output[len(output) - length + 1 :]).all(dim=1)
            last = sequences[:, -1]
            forbidden = torch.zeros_like(logits).index_add_(0, last, begun.to(logits.dtype))
            logits.masked_fill_(forbidden > 0, -math.inf)

    def _limit_reasoning(self, logits: Tensor, output: Tensor, limit: ReasoningLimit) -> None:
        """Force the next token of the end marker, if the limit is reached and the reasoning had not ended before."""
        start, end = limit.start_token_ids, limit.end_token_ids
        at = len(output) - len(start) - limit.max_tokens
        if not 0 <= at < len(end):
            return
        reasoning = output[len(start) : len(start) + limit.max_tokens]
        is_open = torch.ones((), dtype=torch.bool, device=self._device)
        if start:
            is_open = (output[: len(start)] == upload(start, torch.int32, self._device)).all()
        if limit.max_tokens >= len(end):
            windows = reasoning.unfold(0, len(end), 1)
            is_open &= ~(windows == upload(end, torch.int32, self._device)).all(dim=1).any()
        forced = torch.full_like(logits, -math.inf)
        forced[end[at]] = 0.0
        torch.where(is_open, forced, logits, out=logits)
