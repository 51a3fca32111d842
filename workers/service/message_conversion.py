"""Conversion between the protobuf messages of the worker contract and the engine's types. Pure functions."""

from collections.abc import Iterator, Sequence

from coatcheck.proto.errors import CoatcheckError, InvalidRequest, status_of
from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as public
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core import step_output
from coatcheck.workers.core.request import EngineRequest, Pooling

# The event of a stored block takes 42 bytes: a full message stays below the contract's 256 KiB.
EVENTS_PER_MESSAGE = 6000
# Log-probabilities of one message to a router, unless one sequence's are more. A sequence's are at most 21 MB, and the
# router accepts messages of 64 MiB.
LOGPROB_BYTES_PER_MESSAGE = 16 * 1024 * 1024
# Blocks in one chunk of a snapshot. A chunk takes the engine's thread, the service's and the router 1 to 2 ms each.
CHUNK_BLOCKS = 1000


def request_from_message(submit: wire.Submit, engine_request_id: str) -> EngineRequest:
    """The engine's form of a submission. Raises InvalidRequest for an invalid sampling parameter or retention."""
    if submit.pooling not in public.Pooling.values():
        raise InvalidRequest(f"pooling is {submit.pooling}, which this group does not know")
    return EngineRequest(
        request_id=engine_request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=SamplingParams.from_message(submit.sampling),
        resume={resumed.choice: tuple(resumed.token_ids) for resumed in submit.resume},
        cache_salt=submit.cache_salt,
        priority=submit.priority,
        uncached_tokens=submit.uncached_tokens if submit.HasField("uncached_tokens") else None,
        retention=Retention.from_message(submit.retention) if submit.HasField("retention") else None,
        tenant=submit.tenant,
        pooling=Pooling(submit.pooling),
        adapter=submit.adapter,
        seconds_left=submit.seconds_left if submit.HasField("seconds_left") else None,
    )


def write_output(
    message: wire.SequenceOutput, output: step_output.SequenceOutput, submit_id: int, attempt: int
) -> None:
    """Fill an empty message. Zeros are not assigned, since this runs for each sequence in each step."""
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
    if output.embedding:
        message.embedding.extend(output.embedding)
    if output.finish_reason is not None:
        message.finish_reason = output.finish_reason.value  # type: ignore[assignment]  # the same numbers by contract
    if output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    if output.cached_device_tokens >= 0:
        message.first_output.device_tokens = output.cached_device_tokens
        message.first_output.host_tokens = max(output.cached_host_tokens, 0)
        message.first_output.queued_seconds = output.queued_seconds
        message.first_output.prefill_seconds = output.prefill_seconds


def logprob_bytes(output: step_output.SequenceOutput) -> int:
    """About the size of the log-probabilities in the output's message."""
    if not (output.logprobs or output.prompt_logprobs):
        return 0
    return sum(entry.num_bytes for part in (output.logprobs, output.prompt_logprobs) for entry in part)


def event_messages(epoch: str, sequence: int, events: Sequence[step_output.KvEvent]) -> Iterator[wire.FromGroup]:
    """The events, numbered from `sequence`, in messages of at most EVENTS_PER_MESSAGE events."""
    for start in range(0, len(events), EVENTS_PER_MESSAGE):
        part = events[start : start + EVENTS_PER_MESSAGE]
        yield wire.FromGroup(
            events=wire.KvEvents(epoch=epoch, sequence=sequence + start, events=map(_event, part)),
        )


def refusal_message(submit_id: int, attempt: int, error: CoatcheckError) -> wire.FromGroup:
    """The refusal of a submission, whose remaining choices get no more output."""
    refused = wire.Refused(id=submit_id, attempt=attempt, code=status_of(error)[0], message=str(error))
    return wire.FromGroup(refused=refused)


def chunk_message(
    epoch: str, sequence: int, blocks: Sequence[step_output.KvEvent], *, first: bool, last: bool
) -> wire.FromGroup:
    """A chunk of a snapshot. The events that follow it are numbered from `sequence`."""
    return wire.FromGroup(
        snapshot=wire.SnapshotChunk(epoch=epoch, sequence=sequence, events=map(_event, blocks), first=first, last=last)
    )


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
        all_logprobs=logprob.all_logprobs,
    )
