"""Sequence: one choice of a request while a group works on it; mutable, owned by the scheduler.

Two counts of progress are kept, because plan N + 1 is made before step N's tokens are known: *scheduled* is what
plans have asked for, *confirmed* is what ranks have reported. It does not know blocks' contents nor the wire.

    token_ids   [ prompt ............ | resumed | generated ]        confirmed tokens
                  ^ num_computed: their keys and values are in the pool, confirmed
                     ^ num_scheduled: and planned
    num_pending   sampled by a plan in flight, so not yet in token_ids
"""

import math
from dataclasses import dataclass, field
from typing import Self

from coatcheck.workers.core.cache_reasons import PrefixMiss
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import FinishReason, SequenceOutput, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """`leader` is the choice whose prompt blocks this one shares (None: it computes its own prompt)."""

    request: EngineRequest
    choice: int
    token_ids: list[int]
    max_len: int  # tokens, prompt included, at which it ends
    arrival: tuple[int, int]  # its place in every queue: by priority, then in order of arrival
    end_token_ids: frozenset[int]  # end-of-sequence (unless ignored) and stop tokens
    leader: Self | None = None
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0  # leading blocks that are in the prefix cache under their hash
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    num_restoring: int = 0  # blocks of its table that are still to come from the host tier: till then it is not planned
    cached_device_tokens: int = -1  # of the prompt, at first admission
    cached_host_tokens: int = 0
    miss: PrefixMiss | None = None
    awaited_hash: bytes = b""  # the prefix block that another sequence computes for it, as last seen
    num_prompt_logprobs: int = 0  # reported
    reported: bool = False
    submitted_at: float = 0.0
    deadline: float = math.inf  # it begins by then or never
    started_at: float = 0.0  # when its first step was planned; 0: not yet
    finish_reason: FinishReason | None = None
    gone: bool = False  # finished or aborted: results still in flight are dropped

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens there will be once every plan in flight is confirmed."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Confirmed output tokens, resumed ones included."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no plan has asked for yet; 1 is a decode, more a prefill."""
        return self.num_tokens - self.num_scheduled

    @property
    def num_foreseen(self) -> int:
        """While it waits: tokens that it will have computed when its turn has come, as far as anyone knows now."""
        if self.leader is not None and not self.leader.gone:
            return 1  # the leader computes its prompt
        foreseen = self.request.uncached_tokens
        if foreseen is None or self.num_preemptions:
            return self.num_uncomputed
        return min(self.num_uncomputed, foreseen + self.num_outputs)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed whole, cache or no cache."""
        return self.choice == 0 and self.request.sampling.prompt_logprobs is not None

    def take_prompt_logprobs(self, start: int, reports: list[TokenLogprob]) -> list[TokenLogprob]:
        """Those from `start` on that were not reported yet: a preempted prompt is computed, and scored, again, perhaps
        in other chunks."""
        known = self.num_prompt_logprobs - start
        new = reports[known:] if known >= 0 else []
        self.num_prompt_logprobs += len(new)
        return new

    def report_beginning(self, output: SequenceOutput, now: float) -> None:
        """Its first output says, once, what of its prompt was found and how long it has waited."""
        self.reported = True
        output.cached_device_tokens = self.cached_device_tokens
        output.cached_host_tokens = self.cached_host_tokens
        output.miss = self.miss
        output.queued_seconds = self.started_at - self.submitted_at
        output.prefill_seconds = now - self.started_at

    def end_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, its newest token, or None."""
        if token_id in self.end_token_ids and self.num_outputs >= self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None
