"""Messages of the worker contract and the engine's types."""

from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2 import Submit
from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.service.message_conversion import (
    CHUNK_BLOCKS,
    EVENTS_PER_MESSAGE,
    chunk_message,
    event_messages,
    request_from_message,
)


def test_blocks_count_towards_their_tenant() -> None:
    """A submission's tenant owns its blocks. Without a tenant the owner is the cache salt."""
    submit = Submit(id=1, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1, seed=1), cache_salt="a")
    assert request_from_message(submit, "1").owner == "a"
    submit.tenant = "us"
    assert request_from_message(submit, "1").owner == "us"


def test_messages_of_events_keep_the_contracts_bound() -> None:
    """A full message of stored events stays below 256 KiB, and a full chunk of a snapshot below 64 KiB."""
    events = [KvEvent(True, b"h" * 16, b"p" * 16, Tier.DEVICE)] * (2 * EVENTS_PER_MESSAGE + 1)
    chunk = chunk_message("e" * 36, 2**60, events[:CHUNK_BLOCKS], first=True, last=False)
    assert chunk.ByteSize() <= 64 << 10 and (chunk.snapshot.first, chunk.snapshot.last) == (True, False)
    assert chunk.snapshot.sequence == 2**60 and len(chunk.snapshot.events) == CHUNK_BLOCKS
    messages = list(event_messages("e", 10, events))
    assert max(message.ByteSize() for message in messages) <= 256 << 10
    sequences = [message.events.sequence for message in messages]
    assert sequences == [10, 10 + EVENTS_PER_MESSAGE, 10 + 2 * EVENTS_PER_MESSAGE]
