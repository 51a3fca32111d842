"""Sequence: one choice of a request while its group computes it. Mutable, owned by the scheduler.

Progress is counted twice, because plan N + 1 is made before the tokens of step N are known: *scheduled* is what plans
have asked for, *computed* is what ranks have reported.

    token_ids   [ prompt ............ | resumed | generated ]        known tokens
                  ^ num_computed: tokens whose KV is in the pool
                     ^ num_scheduled: the same, and the tokens of plans in flight
    num_output_placeholders   tokens that plans in flight sample; not yet in token_ids
"""

import math
from dataclasses import dataclass, field
from typing import Self

from coatcheck.workers.core.cache_reasons import PrefixMiss
from coatcheck.workers.core.prompt_lookup import PromptLookup
from coatcheck.workers.core.request import EngineRequest, Pooling
from coatcheck.workers.core.step_output import FinishReason, SequenceOutput, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """`prompt_source`: the choice of the same request that computes the shared prompt; None if this choice does.

    `max_len`: tokens, prompt included, at which the sequence ends.
    `sort_key`: sort key of every queue: (priority, order of arrival).
    `end_token_ids`: end-of-sequence tokens (unless ignored) and the request's stop tokens.
    `num_registered`: leading blocks that are registered in the prefix cache.
    `num_restoring`: blocks that are being copied from the host tier. The sequence is in no plan until this is 0.
    `cached_device_tokens`, `cached_host_tokens`: prompt tokens that the tiers had at the first admission. The first is
    -1 before.
    `snapshot_points`: numbers of leading blocks after which the states are to be saved, ascending; a chunk ends there.
    `last_snapshot`: the number of leading blocks after which its states were last restored or saved; 0 before.
    `awaited_hash`: the last prefix block for which this sequence waited while another sequence computed it.
    `forced_token_ids`: the tokens of the text that the grammar forces next, as the tokenizer would write it.
    `prompt_lookup`: the text in which drafts are looked up; None before the first. `draft_match`: Draft.match of the
    sequence's tokens in the step that is being computed.
    """

    request: EngineRequest
    choice: int
    token_ids: list[int]
    max_len: int
    sort_key: tuple[int, int]
    end_token_ids: frozenset[int]
    prompt_source: Self | None = None
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    num_restoring: int = 0
    cached_device_tokens: int = -1
    cached_host_tokens: int = 0
    miss: PrefixMiss | None = None
    snapshot_points: list[int] = field(default_factory=list)
    last_snapshot: int = 0
    awaited_hash: bytes = b""
    forced_token_ids: list[int] = field(default_factory=list)
    prompt_lookup: PromptLookup | None = None
    draft_match: int = 0
    num_prompt_logprobs: int = 0  # already sent
    adapter: int = 0  # the index of the request's adapter in a step, from 1; 0 without one
    embedding: list[float] = field(default_factory=list)  # of the prompt, once it is computed
    has_sent_output: bool = False
    submitted_at: float = 0.0
    deadline: float = math.inf  # refused if not started by then
    started_at: float = 0.0  # when the first step was planned; 0 before
    finish_reason: FinishReason | None = None
    is_finished: bool = False  # ended or aborted; results in flight are dropped

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens once all plans in flight are computed."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_outputs(self) -> int:
        """Known output tokens, resumed ones included."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_unscheduled(self) -> int:
        """Tokens that no plan has asked for. 1 is a decode, more is a prefill."""
        return self.num_tokens - self.num_scheduled

    @property
    def num_expected_tokens(self) -> int:
        """Of a waiting sequence: the tokens to compute after its admission, by the router's estimate."""
        if self.prompt_source is not None and not self.prompt_source.is_finished:
            return 1  # `prompt_source` computes the prompt
        uncached = self.request.uncached_tokens
        if uncached is None or self.num_preemptions:
            return self.num_unscheduled
        return min(self.num_unscheduled, uncached + self.num_outputs)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether the whole prompt must be computed, cached or not."""
        if self.choice:
            return False
        pooling = Pooling.NONE if self.has_sent_output else self.request.pooling
        # A resumed prompt may be cached with its last token, whose hidden state is the embedding.
        needs_states = pooling is Pooling.MEAN or (pooling is Pooling.LAST and bool(self.request.resume))
        return needs_states or self.request.sampling.prompt_logprobs is not None

    def take_new_prompt_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
        """The part of `logprobs` that has not been sent. `start`: the position of the first of `logprobs`.

        After a preemption the prompt is computed again, perhaps in other chunks, so `logprobs` may overlap those sent.
        """
        known = self.num_prompt_logprobs - start
        new = logprobs[known:] if known >= 0 else []
        self.num_prompt_logprobs += len(new)
        return new

    def fill_first_output(self, output: SequenceOutput, now: float) -> None:
        """Set what only the first output of a sequence has: cached tokens, prefix miss, times."""
        self.has_sent_output = True
        output.cached_device_tokens = self.cached_device_tokens
        output.cached_host_tokens = self.cached_host_tokens
        output.miss = self.miss
        output.embedding = self.embedding
        output.queued_seconds = self.started_at - self.submitted_at
        output.prefill_seconds = now - self.started_at

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the sequence ends with its newest token, `token_id`; None if it goes on."""
        if token_id in self.end_token_ids and self.num_outputs >= self.request.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None
