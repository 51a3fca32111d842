"""Messages of the worker contract and the engine's types."""

from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2 import Submit
from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent
from coatcheck.workers.service.message_conversion import (
    EVENTS_PER_MESSAGE,
    event_messages,
    request_from_message,
    snapshot_messages,
)


def test_blocks_count_towards_their_tenant() -> None:
    """A submission's tenant owns its blocks. Without a tenant the owner is the cache salt."""
    submit = Submit(id=1, prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1, seed=1), cache_salt="a")
    assert request_from_message(submit, "1").owner == "a"
    submit.tenant = "us"
    assert request_from_message(submit, "1").owner == "us"


def test_messages_of_events_keep_the_contracts_bound() -> None:
    """A full message of stored events stays below 256 KiB. The first and the last chunk are marked."""
    events = [KvEvent(True, b"h" * 16, b"p" * 16, Tier.DEVICE)] * (2 * EVENTS_PER_MESSAGE + 1)
    chunks = list(snapshot_messages("e" * 36, 2**60, events))
    assert [(chunk.snapshot.first, chunk.snapshot.last) for chunk in chunks] == [(1, 0), (0, 0), (0, 1)]
    assert max(chunk.ByteSize() for chunk in chunks) <= 256 << 10
    sequences = [message.events.sequence for message in event_messages("e", 10, events)]
    assert sequences == [10, 10 + EVENTS_PER_MESSAGE, 10 + 2 * EVENTS_PER_MESSAGE]
