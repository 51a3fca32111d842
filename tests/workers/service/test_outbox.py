"""The messages that wait to be written to a router's stream."""

import asyncio

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.service.outbox import Outbox


async def test_messages_are_written_in_order_and_waited_for() -> None:
    """Messages are written in the order in which they were put. Whoever waits until all are written is woken then."""
    outbox = Outbox(1 << 20)
    sent: list[int] = []
    written = asyncio.Event()

    async def write(message: wire.FromGroup) -> None:
        await written.wait()
        sent.append(message.events.sequence)

    await outbox.wait_until_written()  # nothing waits
    for sequence in range(3):
        outbox.put_message(wire.FromGroup(events=wire.KvEvents(sequence=sequence)))
    writer = asyncio.create_task(outbox.write_messages(write))
    waiter = asyncio.create_task(outbox.wait_until_written())
    await asyncio.sleep(0)
    assert not sent and not waiter.done()
    written.set()
    await waiter
    writer.cancel()
    assert sent == [0, 1, 2]
