"""StepOutput: what one engine step gave, for whoever serves it: tokens per sequence, KV events, load.

Plain values that can cross a thread. It does not know the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason, PrefixMiss, Tier


class FinishReason(Enum):
    """Why a choice ended. The values are those of the public contract's enum."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability, its rank (1: most likely), and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one choice. `cached_*` are set on its first token, -1 otherwise, and so are the seconds that it
    waited and that its prompt took, and why its prefix missed, if it did.

    `prompt_logprobs` come chunk by chunk as the prompt is computed, before the first token or with it.
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


@dataclass(frozen=True, slots=True)
class KvEvent:
    """A block began or ceased to be held in a tier."""

    stored: bool
    block_hash: bytes
    parent_hash: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step: `num_prefill_tokens` and `num_decodes` are what it computed, `seconds` what it took. `refused` are the
    requests, by id, that had to be given up, and why."""

    step: int
    outputs: list[SequenceOutput]
    events: list[KvEvent]
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    seconds: float = 0.0
    refused: list[tuple[str, CoatcheckError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is there now."""

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
    demote_seconds: float = 0.0  # of one block, on the slowest rank
    restore_seconds: float = 0.0
    slowness: float = 1.0  # how many times as long as usual steps take, lately
