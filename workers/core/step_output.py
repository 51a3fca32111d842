"""StepOutput: the result of one engine step, for the service: new tokens, KV events, statistics.

Values pass between threads, so they are immutable, or the engine keeps no reference to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason, PrefixMiss, Tier


class FinishReason(Enum):
    """Why a choice ended. The values equal those of the public contract."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`rank`: 1 for the most likely token. `top`: (token id, log-probability) of the most likely tokens, or of the
    tokens that the request names. `all_logprobs`: little-endian float32 [vocab_size] if the request asks for the
    log-probabilities of all tokens, else empty."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    all_logprobs: bytes = b""

    @property
    def num_bytes(self) -> int:
        """The approximate size of the protobuf message."""
        return 16 + 13 * len(self.top) + len(self.all_logprobs)


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one choice.

    `cached_device_tokens`, `cached_host_tokens`, `queued_seconds`, `prefill_seconds`, `miss` and `embedding` are set in
    the output with the first token, and have their defaults in all others.
    `prompt_logprobs`: come in chunks as the prompt is computed, before or with the first token.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_device_tokens: int = -1
    cached_host_tokens: int = -1
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    queued_seconds: float = 0.0
    prefill_seconds: float = 0.0
    miss: PrefixMiss | None = None
    embedding: list[float] = field(default_factory=list)

    def extend(self, later: "SequenceOutput") -> None:
        """Append the tokens of a later output of the same step, and its end."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_token_id = later.finish_reason, later.stop_token_id


@dataclass(frozen=True, slots=True)
class KvEvent:
    """A tier stored a block (`stored`) or removed it."""

    stored: bool
    block_hash: bytes
    parent_hash: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`seconds`: duration of the step. `refused`: (request id, error) of requests that cannot be answered."""

    step: int
    outputs: list[SequenceOutput]
    events: list[KvEvent]
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    seconds: float = 0.0
    refused: list[tuple[str, CoatcheckError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateSnapshotStats:
    """Snapshots of recurrent states. `slots`, `held`: at present. `saves`, `restores`, `evictions`: since the start."""

    slots: int = 0
    held: int = 0
    saves: int = 0
    restores: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The counters from `prompt_tokens` to `prefill_seconds`, from `demotions` to `prefix_misses`, `draft_tokens` and
    `accepted_draft_tokens` are totals since the start. The other fields are present values or running averages."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    queued_prefill_tokens: int
    prompt_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    step_seconds: float
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    demotions: int = 0
    restores: int = 0
    integrity_failures: int = 0
    device_evictions: Mapping[EvictionReason, int] = field(default_factory=dict)
    host_evictions: Mapping[EvictionReason, int] = field(default_factory=dict)
    prefix_misses: Mapping[MissReason, int] = field(default_factory=dict)  # requests
    demote_seconds: float = 0.0  # of one block on the slowest rank
    restore_seconds: float = 0.0
    slowness: float = 1.0  # recent step time over usual step time
    snapshots: StateSnapshotStats = StateSnapshotStats()
    draft_tokens: int = 0  # computed by steps (speculative decoding)
    accepted_draft_tokens: int = 0  # of these, the right ones
