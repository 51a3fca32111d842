"""StepMail: what a step's output is to routers: events for all of them, one batch of tokens for each that has some.

It numbers the events. In the engine's thread; it does not know how messages travel, nor what a refusal looks like.
"""

from collections.abc import Collection

from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.workers.core.step_output import StepOutput
from coatcheck.workers.service.open_requests import OpenRequests
from coatcheck.workers.service.outbox import Outbox
from coatcheck.workers.service.wire import event_messages, write_output

Mail = list[tuple[Outbox, wire.FromGroup]]


class StepMail:
    """Of one incarnation of a group; `sequence` is the next event's number."""

    def __init__(self, epoch: str, tickets: OpenRequests) -> None:
        self.sequence = 0
        self._epoch = epoch
        self._tickets = tickets

    def of(self, output: StepOutput, subscribers: Collection[Outbox]) -> Mail:
        """In the order of sending; the tickets know then what has been written."""
        mail: Mail = []
        if output.events:
            if subscribers:
                for message in event_messages(self._epoch, self.sequence, output.events):
                    mail.extend((subscriber, message) for subscriber in subscribers)
            self.sequence += len(output.events)
        batches: dict[int, wire.FromGroup] = {}
        for sequence in output.outputs:
            ticket = self._tickets.get(sequence.request_id)
            if ticket is None:
                continue  # its router has gone or has given it up; the abort is on its way to the engine
            batch = batches.get(ticket.subscriber.number)
            if batch is None:
                batch = batches[ticket.subscriber.number] = wire.FromGroup(batch=wire.StepBatch(step=output.step))
                mail.append((ticket.subscriber, batch))
            write_output(batch.batch.outputs.add(), sequence, ticket.submit_id, ticket.attempt)
            self._tickets.wrote(sequence.request_id, ticket, sequence)
        return mail
