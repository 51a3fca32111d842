"""The messages that wait to be written to a router's stream."""

import asyncio

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.service.outbox import Outbox


async def test_tokens_overtake_a_snapshot_and_events_do_not() -> None:
    """While a snapshot is written, tokens go first and events wait. Events that the snapshot contains are dropped."""
    outbox = Outbox(1 << 20)
    sent: list[str] = []

    async def write(message: wire.FromGroup) -> None:
        kind = message.WhichOneof("message") or ""
        sent.append(f"{kind}{message.events.sequence}" if kind == "events" else kind)

    def events(sequence: int) -> wire.FromGroup:
        return wire.FromGroup(events=wire.KvEvents(sequence=sequence, events=[wire.KvEvent()]))

    outbox.hold_events()
    for message in (events(1), events(2), wire.FromGroup(batch=wire.StepBatch())):
        outbox.put_message(message)
    chunk = wire.FromGroup(snapshot=wire.SnapshotChunk())
    outbox.put_snapshot(2, iter([chunk, chunk]))
    writer = asyncio.create_task(outbox.write_messages(write))
    await asyncio.sleep(0)
    outbox.put_message(events(3))
    await asyncio.sleep(0)
    writer.cancel()
    assert sent == ["batch", "snapshot", "snapshot", "events2", "events3"]
