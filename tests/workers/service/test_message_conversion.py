"""Messages of the worker contract and the engine's types."""

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams
from coatcheck.proto.stubs.worker_pb2 import Registration, Submit
from coatcheck.workers.core.cache_reasons import Tier
from coatcheck.workers.core.step_output import KvEvent, SequenceOutput, StepOutput, TokenLogprob
from coatcheck.workers.service import router_session
from coatcheck.workers.service.message_conversion import (
    CHUNK_BLOCKS,
    EVENTS_PER_MESSAGE,
    chunk_message,
    event_messages,
    request_from_message,
)
from coatcheck.workers.service.request_log import RequestLog


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


async def test_a_step_of_many_logprobs_is_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has at most the bound, or one output. The order of the outputs stays."""
    monkeypatch.setattr(router_session, "LOGPROB_BYTES_PER_MESSAGE", 1000)
    table = router_session.SessionTable(Registration(epoch="e"), RequestLog("g"), 8)
    session = router_session.RouterSession(1, "r", table, None, 1 << 20)  # type: ignore[arg-type]  # not used
    sizes = [0, 10, 300, 0, 100, 2, 0]
    for number in range(len(sizes)):
        table.open_request(str(number), session, Submit(id=number), 1, number + 1)
    step = StepOutput(
        4,
        [
            SequenceOutput(str(number), 0, [7], [TokenLogprob(7, -1.0, 1, (), bytes(4 * size))] if size else [])
            for number, size in enumerate(sizes)
        ],
        [],
    )
    batches = [message.batch for _, message in table.build_messages(step)]
    assert [[output.id for output in batch.outputs] for batch in batches] == [[0, 1], [2], [3, 4, 5, 6]]
    assert {batch.step for batch in batches} == {4}
    assert [len(output.logprobs[0].all_logprobs) for output in batches[1].outputs if output.logprobs] == [1200]
