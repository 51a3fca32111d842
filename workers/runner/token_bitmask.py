"""TokenBitmasks: which tokens the grammar of each constrained slot allows next.

A sequence with a grammar has a matcher, which advances token by token. `record_tokens` gets sampled tokens while they
are still being copied to the host. They are read only for the next mask, which on a GPU the host computes while the
next step's forward pass runs.

A draft token's row samples the token after the draft token. Its mask comes from a copy of the matcher that has consumed
the slot's draft tokens up to this one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.proto.grammar import describe_matcher_error
from coatcheck.workers.core.step_plan import DraftToken, NewSequence
from coatcheck.workers.runner.host_transfer import HostCopy, upload
from coatcheck.workers.structured.grammar_backend import GrammarBackend

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Bits = np.ndarray[tuple[int, int], np.dtype[np.int32]]

_NUM_THREADS = 4
# CPU time that a grammar may take for masks and matching: a burst, and what each token adds. JSON schemas take 0.02 to
# 0.4 ms a token over a vocabulary of 128,000. An ambiguous grammar may take 0.8 s within llguidance's own limits, while
# every request of the step waits.
_BURST_SECONDS: Final = 0.25
_SECONDS_PER_TOKEN: Final = 0.005
# If computing all masks took longer than this, the next ones are computed one by one, to find the slow grammar.
_SLOW_SECONDS: Final = 0.02


@dataclass(slots=True, weakref_slot=True)
class _CpuBudget:
    """A token bucket of CPU seconds, shared by all sequences with one grammar."""

    seconds: float = _BURST_SECONDS

    def spend(self, seconds: float, num_tokens: int) -> bool:
        """Spend `seconds` for `num_tokens` tokens. Returns False if the budget is exceeded, and these tokens were slow
        themselves."""
        earned = num_tokens * _SECONDS_PER_TOKEN
        self.seconds = min(self.seconds + earned, max(earned, _BURST_SECONDS)) - seconds
        return self.seconds >= 0 or seconds <= earned


@dataclass(slots=True)
class _Constraint:
    """One constrained sequence. `seconds`, `num_tokens`: CPU time of matching, and tokens matched, since its last
    mask. `finds_forced`: whether its grammar says quickly what it forces."""

    matcher: LLMatcher
    budget: _CpuBudget
    seconds: float = 0.0
    num_tokens: int = 0
    finds_forced: bool = True

    def consume(self, token_id: int) -> None:
        """Advance the matcher. No effect on one that has ended: a finished sequence may still have a row in flight."""
        self.num_tokens += 1
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)

    def find_forced(self) -> list[int]:
        """The tokens of the text that the grammar forces next; [] if it forces none. Also [] after a call that was
        slow: these tokens become draft tokens, for which no request should wait."""
        if not self.finds_forced or self.matcher.is_stopped():
            return []
        started = time.thread_time()
        forced: list[int] = self.matcher.compute_ff_tokens()
        self.finds_forced = time.thread_time() - started <= _SECONDS_PER_TOKEN
        return forced


class _Unread(NamedTuple):
    """Where the sampled tokens of one constrained sequence are in a host copy. `token_index`: of its next token.
    `drafts`: (draft token, index of the token sampled after it) pairs; that token counts only if the draft token was
    right."""

    constraint: _Constraint
    token_index: int
    drafts: list[tuple[int, int]]


class TokenBitmasks:
    """The matchers of one rank. On a CPU masks are computed in one thread, because the model's threads need the cores.

    A sequence that exceeds its grammar's budget is reported as failed but still gets its mask: CPU time differs between
    ranks, masks must not. Only rank 0's report counts.
    """

    def __init__(self, grammars: GrammarBackend, vocab_size: int, device: torch.device) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._constraints: dict[int, _Constraint] = {}  # by slot
        self._budgets = WeakValueDictionary[int, _CpuBudget]()  # by grammar id, while a sequence has the grammar
        self._unread: list[tuple[HostCopy, list[_Unread]]] = []  # sampled tokens that the matchers have not consumed
        self._executor: LLExecutor | None = None
        self._was_slow = False

    def set_grammar(self, new: NewSequence) -> None:
        """Constrain the slot of a new sequence, or remove its constraint. Output tokens in `new` are consumed."""
        self._constraints.pop(new.slot, None)
        if new.grammar_id is not None:
            output = new.token_ids[new.prompt_len :]
            budget = self._budgets.setdefault(new.grammar_id, _CpuBudget())
            self._constraints[new.slot] = _Constraint(self._grammars.create_matcher(new.grammar_id, output), budget)

    def record_tokens(self, slots: Sequence[int], token_ids: HostCopy, drafts: Sequence[DraftToken] = ()) -> None:
        """Keep the tokens sampled for `slots` until the next masks are computed. `drafts`: of the last rows."""
        if not self._constraints:
            return
        first = len(slots) - len(drafts)
        unread = {
            slot: _Unread(self._constraints[slot], index, [])
            for index, slot in enumerate(slots[:first])
            if slot in self._constraints
        }
        for index, draft in enumerate(drafts, first):
            if draft.slot in unread:
                unread[draft.slot].drafts.append((draft.token_id, index))
        if unread:
            self._unread.append((token_ids, list(unread.values())))

    def compute_masks(
        self, slots: Sequence[int], drafts: Sequence[DraftToken] = ()
    ) -> tuple[list[int], Tensor, dict[int, str]] | None:
        """Masks for rows of these slots; None if no row is constrained. `drafts`: of the last rows, in their order.

        Returns (constrained rows, int32 [n, ceil(vocab / 32)] on the device, reasons of rows that cannot continue).
        """
        rows = [row for row, slot in enumerate(slots) if slot in self._constraints] if self._constraints else []
        if not rows:
            return None
        from llguidance.numpy import allocate_token_bitmask  # imported late, as in proto/grammar.py

        self._consume_tokens()
        first = len(slots) - len(drafts)
        planned = [row for row in rows if row < first]
        constraints = [self._constraints[slots[row]] for row in planned]
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        over_budget = self._fill_masks(constraints, bits)
        failed: dict[int, str] = {}
        for at, (row, constraint) in enumerate(zip(planned, constraints, strict=True)):
            if _is_stuck(constraint.matcher, bits[at]):
                failed[row] = _explain_failure(describe_matcher_error(constraint.matcher))
                bits[at] = -1  # all tokens, because the sampled one is discarded
            elif at in over_budget:
                failed[row] = _explain_failure(f"it takes {over_budget[at] * 1e3:.0f} ms for a token")
        failed |= self._fill_draft_masks(rows[len(planned) :], drafts, first, bits[len(planned) :])
        return rows, self._to_device(bits), failed

    def find_forced(self, slots: Mapping[int, int]) -> dict[int, list[int]]:
        """The tokens of the text that a grammar forces next, for the rows whose grammar does. `slots`: by row."""
        self._consume_tokens()
        return {row: self._constraints[slot].find_forced() for row, slot in slots.items() if slot in self._constraints}

    def _fill_draft_masks(
        self, rows: list[int], drafts: Sequence[DraftToken], first: int, bits: Bits
    ) -> dict[int, str]:
        """Compute the masks of the constrained rows of draft tokens. Return the reasons of rows that cannot continue.
        The time is not charged to the grammar's budget, because no request asked for draft tokens.

        `first`: the row of the first of `drafts`.
        """
        if not rows:
            return {}
        from llguidance.numpy import fill_next_token_bitmask

        failed: dict[int, str] = {}
        copies: dict[int, LLMatcher | None] = {}  # by slot; None after a draft token that ends or breaks it
        for at, row in enumerate(rows):
            slot, _, token_id = drafts[row - first]
            if slot not in copies:
                copies[slot] = self._constraints[slot].matcher.deep_copy()
            matcher = copies[slot]
            if matcher is not None and matcher.validate_tokens([token_id]) == 1:
                matcher.consume_token(token_id)
                fill_next_token_bitmask(matcher, bits, at)
                if not _is_stuck(matcher, bits[at]):
                    continue
                failed[row] = _explain_failure(describe_matcher_error(matcher))
            copies[slot] = None
            bits[at] = -1
        return failed

    def _consume_tokens(self) -> None:
        for token_ids, unread in self._unread:
            tokens = token_ids.wait()
            began = time.thread_time()
            for constraint, index, drafts in unread:
                started = time.thread_time()
                token = tokens[index]
                constraint.consume(token)
                for draft, follows in drafts:
                    if token != draft:
                        break
                    token = tokens[follows]
                    constraint.consume(token)
                constraint.seconds += time.thread_time() - started
            self._was_slow |= time.thread_time() - began > _SLOW_SECONDS
        self._unread.clear()

    def _fill_masks(self, constraints: list[_Constraint], bits: Bits) -> dict[int, float]:
        """Compute all masks. Return the seconds for a token of each sequence that exceeds its budget, by index."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if self._device.type == "cuda" and len(constraints) > 1 and not self._was_slow:
            self._executor = self._executor or LLExecutor(_NUM_THREADS)
            started = time.perf_counter()
            fill_next_token_bitmask_par(
                self._executor, [(each.matcher, at) for at, each in enumerate(constraints)], bits
            )
            self._was_slow = time.perf_counter() - started > _SLOW_SECONDS
            for constraint in constraints:
                constraint.seconds, constraint.num_tokens = 0.0, 0
            return {}
        over_budget: dict[int, float] = {}
        began = time.thread_time()
        for at, constraint in enumerate(constraints):
            started = time.thread_time()
            fill_next_token_bitmask(constraint.matcher, bits, at)
            seconds = constraint.seconds + time.thread_time() - started
            num_tokens = max(constraint.num_tokens, 1)
            constraint.seconds, constraint.num_tokens = 0.0, 0
            if not constraint.budget.spend(seconds, num_tokens):
                over_budget[at] = seconds / num_tokens
        self._was_slow = time.thread_time() - began > _SLOW_SECONDS
        return over_budget

    def _to_device(self, bits: Bits) -> Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(bits)
        return upload(bits, torch.int32, self._device)


def _is_stuck(matcher: LLMatcher, bits: NDArray[np.int32]) -> bool:
    """Whether the matcher has failed, or its mask allows no token."""
    return matcher.is_error() or not bits.any()


def _explain_failure(reason: str) -> str:
    return f"the structured output became too hard to follow ({reason}); make its grammar simpler"
