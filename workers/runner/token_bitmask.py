"""TokenBitmasks: which tokens each constrained slot may have next.

A sequence that takes a slot with a grammar gets a matcher, which follows it token by token. Tokens are handed over as
they are drawn and read only when the next mask needs them: on a GPU that is while the next step's forward pass runs, so
the host's work hides behind it. It does not know logits, nor when a sequence ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from coatcheck.proto.grammar import describe_matcher_error
from coatcheck.workers.core.step_plan import NewRow
from coatcheck.workers.runner.host_transfer import Download, upload
from coatcheck.workers.structured.grammar_backend import GrammarBackend

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_THREADS = 4
# Of the processor, for masks and for following tokens. Schemas take 0.02 to 0.4 ms a token over 128,000 tokens, the
# library's own limits let an ambiguous grammar take 0.8 s, and everybody's step waits.
_SECONDS_AHEAD: Final = 0.25
_SECONDS_A_TOKEN: Final = 0.005
_SLOW_SECONDS: Final = 0.02  # of masks made side by side: after that they are made one by one, to see whose is slow


@dataclass(slots=True, weakref_slot=True)
class _Budget:
    """The processor's seconds that all sequences of one grammar may still take; each token adds to them."""

    seconds: float = _SECONDS_AHEAD

    def is_overdrawn_by(self, seconds: float) -> bool:
        """Takes them for one token. A token that took no more than it adds overdraws nothing."""
        self.seconds = min(self.seconds + _SECONDS_A_TOKEN, _SECONDS_AHEAD) - seconds
        return self.seconds < 0 and seconds > _SECONDS_A_TOKEN


@dataclass(slots=True)
class _Follower:
    """`seconds`: what following the tokens since its last mask has taken."""

    matcher: LLMatcher
    budget: _Budget
    seconds: float = 0.0


class TokenBitmasks:
    """Of one rank. On a CPU the cores belong to the model's threads, so masks are made one after another.

    A sequence that overdraws its grammar's budget fails, but gets its mask: clocks differ between ranks, masks must
    not. Only what rank 0 says of failures counts.
    """

    def __init__(self, grammars: GrammarBackend, vocab_size: int, device: torch.device) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._followers: dict[int, _Follower] = {}
        self._budgets = WeakValueDictionary[int, _Budget]()  # by the grammar's number, while a sequence has it
        self._drawn: list[tuple[Download, list[tuple[int, _Follower]]]] = []  # (tokens, whose each place is)
        self._pool: LLExecutor | None = None
        self._was_slow = False

    def set(self, new: NewRow) -> None:
        """A sequence takes its slot; what it has said so far is part of its row."""
        self._followers.pop(new.slot, None)
        if new.grammar_id is not None:
            said = new.token_ids[new.prompt_len :]
            budget = self._budgets.setdefault(new.grammar_id, _Budget())
            self._followers[new.slot] = _Follower(self._grammars.create_matcher(new.grammar_id, said), budget)

    def masks(self, slots: Sequence[int]) -> tuple[list[int], Tensor, dict[int, str]] | None:
        """For rows of these slots: (the constrained rows, a mask for each, int32 [n, ceil(V / 32)] on the device, and
        why a row cannot go on); None when no row is constrained."""
        rows = [row for row, slot in enumerate(slots) if slot in self._followers] if self._followers else []
        if not rows:
            return None
        from llguidance.numpy import allocate_token_bitmask  # late, as in proto/grammar.py

        self._catch_up()
        followers = [self._followers[slots[row]] for row in rows]
        bits = allocate_token_bitmask(len(rows), self._vocab_size)
        slow = self._fill(followers, bits)
        failed: dict[int, str] = {}
        for at, (row, follower) in enumerate(zip(rows, followers, strict=True)):
            if follower.matcher.is_error() or not bits[at].any():
                failed[row] = _too_hard(describe_matcher_error(follower.matcher))
                bits[at] = -1  # its token is drawn for nothing
            elif at in slow:
                failed[row] = _too_hard(f"it takes {slow[at] * 1e3:.0f} ms for a token")
        return rows, self._upload(bits), failed

    def drew(self, slots: Sequence[int], token_ids: Download) -> None:
        """These slots' next tokens, which may still be on their way."""
        if not self._followers:
            return
        followed = [(at, self._followers[slot]) for at, slot in enumerate(slots) if slot in self._followers]
        if followed:
            self._drawn.append((token_ids, followed))

    def _fill(
        self, followers: list[_Follower], bits: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    ) -> dict[int, float]:
        """Makes all masks; returns the places of those that overdraw their budgets, and the seconds they took."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if self._device.type == "cuda" and len(followers) > 1 and not self._was_slow:
            self._pool = self._pool or LLExecutor(_THREADS)
            started = time.perf_counter()
            fill_next_token_bitmask_par(self._pool, [(each.matcher, at) for at, each in enumerate(followers)], bits)
            self._was_slow = time.perf_counter() - started > _SLOW_SECONDS
            for follower in followers:
                follower.seconds = 0.0
            return {}
        slow: dict[int, float] = {}
        began = time.thread_time()
        for at, follower in enumerate(followers):
            started = time.thread_time()
            fill_next_token_bitmask(follower.matcher, bits, at)
            seconds = follower.seconds + time.thread_time() - started
            follower.seconds = 0.0
            if follower.budget.is_overdrawn_by(seconds):
                slow[at] = seconds
        self._was_slow = time.thread_time() - began > _SLOW_SECONDS
        return slow

    def _catch_up(self) -> None:
        for token_ids, followed in self._drawn:
            tokens = token_ids.wait()
            began = time.thread_time()
            for at, follower in followed:
                started = time.thread_time()
                if not follower.matcher.is_stopped():  # a sequence that has ended may have a row in flight
                    follower.matcher.consume_token(tokens[at])
                follower.seconds += time.thread_time() - started
            self._was_slow |= time.thread_time() - began > _SLOW_SECONDS
        self._drawn.clear()

    def _upload(self, bits: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(bits)
        return upload(bits, torch.int32, self._device)


def _too_hard(reason: str) -> str:
    return f"the structured output became too hard to follow ({reason}); make its grammar simpler"
