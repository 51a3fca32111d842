"""TokenMasks: which tokens each constrained slot may have next.

A sequence that takes a slot with a grammar gets a matcher, which follows it token by token. Tokens are handed over as
they are drawn and read only when the next mask needs them: on a GPU that is while the next step's forward pass runs, so
the host's work hides behind it. It does not know logits, nor when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .grammars import Grammars
from .step_plan import NewRow
from .transfer import Download, upload

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_THREADS = 4


class TokenMasks:
    """Of one rank. On a CPU the cores belong to the model's threads, so masks are made one after another."""

    def __init__(self, grammars: Grammars, vocab_size: int, device: torch.device) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._matchers: dict[int, LLMatcher] = {}
        self._drawn: list[tuple[Download, list[tuple[int, LLMatcher]]]] = []  # (tokens, whose each place is)
        self._pool: LLExecutor | None = None

    def set(self, new: NewRow) -> None:
        """A sequence takes its slot; what it has said so far is part of its row."""
        self._matchers.pop(new.slot, None)
        if new.grammar is not None:
            said = new.token_ids[new.prompt_len :]
            self._matchers[new.slot] = self._grammars.matcher(new.grammar, said)

    def masks(self, slots: Sequence[int]) -> tuple[list[int], Tensor, dict[int, str]] | None:
        """For rows of these slots: (the constrained rows, a mask for each, int32 [n, ceil(V / 32)] on the device, and
        why a row can have no mask); None when no row is constrained."""
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers] if self._matchers else []
        if not rows:
            return None
        from llguidance import LLExecutor  # late, as in proto/grammar.py
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

        self._catch_up()
        matchers = [self._matchers[slots[row]] for row in rows]
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        if self._device.type == "cuda" and len(rows) > 1:
            self._pool = self._pool or LLExecutor(_THREADS)
            fill_next_token_bitmask_par(self._pool, [(matcher, at) for at, matcher in enumerate(matchers)], bits)
        else:
            for at, matcher in enumerate(matchers):
                fill_next_token_bitmask(matcher, bits, at)
        failed = {
            row: _reason(matcher) for row, matcher, row_bits in zip(rows, matchers, bits, strict=True)
            if matcher.is_error() or not row_bits.any()
        }  # fmt: skip
        bits[[rows.index(row) for row in failed]] = -1  # its token is drawn for nothing
        return rows, self._upload(bits), failed

    def drew(self, slots: Sequence[int], token_ids: Download) -> None:
        """These slots' next tokens, which may still be on their way."""
        if not self._matchers:
            return
        followed = [(at, self._matchers[slot]) for at, slot in enumerate(slots) if slot in self._matchers]
        if followed:
            self._drawn.append((token_ids, followed))

    def _catch_up(self) -> None:
        for token_ids, followed in self._drawn:
            tokens = token_ids.wait()
            for at, matcher in followed:
                if not matcher.is_stopped():  # a sequence that has ended may have a row in flight
                    matcher.consume_token(tokens[at])
        self._drawn.clear()

    def _upload(self, bits: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(bits)
        return upload(bits, torch.int32, self._device)


def _reason(matcher: LLMatcher) -> str:
    said = matcher.get_error().partition("\n")[0] or "no token of this model can go on with it"
    return f"the structured output became too hard to follow ({said}); make its grammar simpler"
