"""The wire forms of what an engine says, and the engine's form of what a router asks.

Pure conversion between protobuf messages and plain values. It does not know streams or threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from ..proto import coatcheck_pb2 as public
from ..proto import worker_pb2 as wire
from ..proto.retention import Retention
from ..proto.sampling import SamplingParams
from . import step_output
from .prefix_miss import EvictionReason, MissReason
from .request import Request

# A stored block's event takes 42 bytes: a full message stays below the contract's 256 KiB.
EVENTS_PER_MESSAGE = 6000
_Counts = TypeVar("_Counts", public.Evictions, public.PrefixMisses)


def request_of(submit: wire.Submit, request_id: str) -> Request:
    """The engine's form of a submission; raises InvalidRequest for sampling or a retention that cannot be."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=SamplingParams.from_message(submit.sampling),
        resume={resumed.choice: tuple(resumed.token_ids) for resumed in submit.resume},
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        uncached_tokens=submit.uncached_tokens if submit.HasField("uncached_tokens") else None,
        retention=Retention.from_message(submit.retention) if submit.HasField("retention") else None,
        tenant=submit.tenant,
        seconds_left=submit.seconds_left if submit.HasField("seconds_left") else None,
    )


def write_output(
    message: wire.SequenceOutput, output: step_output.SequenceOutput, submit_id: int, attempt: int
) -> None:
    """Fills a message that is still empty: zeros are left as they are, since this runs per sequence and step."""
    message.id = submit_id
    message.token_ids.extend(output.token_ids)
    if attempt:
        message.attempt = attempt
    if output.choice:
        message.choice = output.choice
    if output.logprobs:
        message.logprobs.extend(map(_logprob, output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprob, output.prompt_logprobs))
    if output.finish_reason is not None:
        message.finish_reason = output.finish_reason.value  # type: ignore[assignment]  # the same numbers by contract
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    if output.cached_device_tokens >= 0:
        message.cached.device_tokens = output.cached_device_tokens
        message.cached.host_tokens = max(output.cached_host_tokens, 0)
        message.cached.queued_seconds = output.queued_seconds
        message.cached.prefill_seconds = output.prefill_seconds


def event_messages(epoch: str, sequence: int, events: Sequence[step_output.KvEvent]) -> Iterator[wire.FromGroup]:
    """The events, numbered from `sequence` on, in as many messages as their bound asks for."""
    for start in range(0, len(events), EVENTS_PER_MESSAGE):
        part = events[start : start + EVENTS_PER_MESSAGE]
        yield wire.FromGroup(
            events=wire.KvEvents(epoch=epoch, sequence=sequence + start, events=map(_event, part)),
        )


def snapshot_messages(epoch: str, sequence: int, held: Sequence[step_output.KvEvent]) -> Iterator[wire.FromGroup]:
    """Everything held, at least one chunk; events from `sequence` on follow it."""
    last = max(len(held) - 1, 0) // EVENTS_PER_MESSAGE
    for index in range(last + 1):
        part = held[index * EVENTS_PER_MESSAGE : (index + 1) * EVENTS_PER_MESSAGE]
        yield wire.FromGroup(
            snapshot=wire.SnapshotChunk(
                epoch=epoch, sequence=sequence, events=map(_event, part), first=index == 0, last=index == last
            )
        )


def status_message(
    stats: step_output.EngineStats,
    name: str,
    address: str,
    kernels: str,
    ranks: Sequence[public.RankStatus],
    *,
    block_size: int = 0,
    bytes_per_block: int = 0,
    late_compiles: int = 0,
) -> public.GroupStatus:
    """What a group can say of itself; state, reason and restarts are for those who watch it."""
    status = public.GroupStatus(
        name=name,
        state="serving",
        address=address,
        ranks=ranks,
        running=stats.running,
        waiting=stats.waiting,
        blocks_total=stats.blocks_total,
        blocks_used=stats.blocks_used,
        blocks_cached=stats.blocks_cached,
        prompt_tokens=stats.prompt_tokens,
        cached_device_tokens=stats.cached_device_tokens,
        cached_host_tokens=stats.cached_host_tokens,
        generated_tokens=stats.generated_tokens,
        preemptions=stats.preemptions,
        prefill_tokens_per_second=stats.prefill_tokens_per_second,
        step_seconds=stats.step_seconds,
        slowness=stats.slowness,
        kernels=kernels,
        host_blocks_total=stats.host_blocks_total,
        host_blocks_used=stats.host_blocks_used,
        demotions=stats.demotions,
        restores=stats.restores,
        integrity_failures=stats.integrity_failures,
        host_evictions=sum(stats.host_evictions.values()),
        device_evictions=_by_reason(public.Evictions(), stats.device_evictions),
        host_evicted=_by_reason(public.Evictions(), stats.host_evictions),
        prefix_misses=_by_reason(public.PrefixMisses(), stats.prefix_misses),
        demoted_bytes=stats.demotions * bytes_per_block * len(ranks),
        restored_bytes=stats.restores * bytes_per_block * len(ranks),
        bytes_per_block=bytes_per_block,
        late_compiles=late_compiles,
        demote_bytes_per_second=bytes_per_block / stats.demote_seconds if stats.demote_seconds else 0.0,
        restore_bytes_per_second=bytes_per_block / stats.restore_seconds if stats.restore_seconds else 0.0,
        restore_tokens_per_second=block_size / stats.restore_seconds if stats.restore_seconds else 0.0,
    )
    for rank in status.ranks:
        rank.steps = stats.steps  # ranks step together or not at all
    return status


def _by_reason(message: _Counts, counts: Mapping[EvictionReason, int] | Mapping[MissReason, int]) -> _Counts:
    """Filled: its fields are named as the reasons are."""
    for reason, count in counts.items():
        setattr(message, reason.name.lower(), count)
    return message


def _event(event: step_output.KvEvent) -> wire.KvEvent:
    return wire.KvEvent(
        stored=event.stored,
        block_hash=event.block_hash,
        parent_hash=event.parent_hash,
        tier=event.tier.value,  # type: ignore[arg-type]  # the same numbers by contract
    )


def _logprob(logprob: step_output.TokenLogprob) -> public.TokenLogprob:
    return public.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top=[public.TopLogprob(token_id=token, logprob=value) for token, value in logprob.top],
    )
