"""OutputDelivery: the tickets open on one link, and when their readers are woken.

Writing a step to its streams takes a round: from the moment that the readers are woken until the last of them is back
for more. Rounds take at most half of the time: a step that comes sooner waits, others join it, and each reader gets
them as one delta. So tokens are passed on at once while there is time, and cost less each when there is not, whether
that is for the number of streams or because others need the processor. It does not know how the outputs came.
"""

import asyncio
from collections.abc import Collection, Iterable
from typing import Final

from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.groups.group_failures import FailureCause, GroupFailure
from coatcheck.router.groups.submission import Ejected, GroupLost, Ticket

_LONGEST_WAIT_SECONDS: Final = 0.025
_MOST_AT_ONCE: Final = 256  # readers woken in one round of the event loop; they take about 20 ms


class OutputDelivery:
    """Made by a link, inside its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[int, Ticket] = {}
        self._fresh: list[Ticket] = []  # have outputs, and are to be woken
        self._round = 0
        self._round_began = 0.0
        self._round_seconds = 0.0  # of the last whole one
        self._away = 0  # readers woken in this round that are not back
        self._waiting = False  # a call of _wake is scheduled
        self._continues = False  # the scheduled call wakes more readers of the same round
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def suspicion(self) -> int:
        """Of the most suspicious ticket."""
        return max((ticket.suspicion for ticket in self._tickets.values()), default=0)

    def open(self, ticket: Ticket) -> None:
        """Its outputs are awaited from now on."""
        ticket.on_return = self._returned
        self._tickets[ticket.id] = ticket
        self._idle.clear()

    def get(self, id: int) -> Ticket | None:
        """The ticket, if it is open."""
        return self._tickets.get(id)

    def forget(self, id: int) -> Ticket | None:
        """Nothing more is awaited; returns the ticket if it was open."""
        ticket = self._tickets.pop(id, None)
        if ticket is not None:
            self._returned(ticket.round)
        if not self._tickets:
            self._idle.set()
        return ticket

    async def idle(self) -> None:
        """Waits until no ticket is open."""
        await self._idle.wait()

    def fail_all(self, loss: GroupFailure, unbegun: Collection[int] = ()) -> None:
        """Nothing more comes for anyone. The tickets in `unbegun` have no part in that."""
        tickets, self._tickets = self._tickets, {}
        self._idle.set()
        unbegun = frozenset(unbegun)  # as it comes it would be searched from its beginning for each ticket
        suspects = sum(ticket.suspicion > 0 for ticket in tickets.values())
        innocent = GroupFailure(loss.group, loss.reason, FailureCause.WANTED)
        for id, ticket in tickets.items():
            apart = suspects == (ticket.suspicion > 0)
            ticket.fail(GroupLost(innocent if id in unbegun else loss, apart=apart))

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hands out a step; outputs that nobody awaits, and those of an attempt that was given up, are dropped.
        Raises Ejected for a choice that nobody asked for."""
        tickets, fresh = self._tickets, self._fresh
        for output in outputs:
            ticket = tickets.get(output.id)
            if ticket is not None and ticket.attempt == output.attempt:
                if output.choice >= ticket.choices:
                    raise Ejected(f"the group answered choice {output.choice} of a request that has {ticket.choices}")
                ticket.deliver(output)
                fresh.append(ticket)
        if self._waiting:
            return
        taken = self._loop.time() - self._round_began
        pause = 2 * max(self._round_seconds, taken if self._away else 0.0) - taken
        if pause > 0:
            self._waiting = True
            self._loop.call_later(min(pause, _LONGEST_WAIT_SECONDS), self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        if not self._continues:
            self._round += 1
            self._round_began = self._loop.time()
            self._away = 0
        fresh, self._fresh = self._fresh[:_MOST_AT_ONCE], self._fresh[_MOST_AT_ONCE:]
        # A reader whose client does not read is not there to be woken, and does not hold up later rounds.
        self._away += sum([ticket.wake(self._round) for ticket in fresh])
        self._continues = self._waiting = bool(self._fresh)
        if self._continues:  # the event loop does other work between two batches
            self._loop.call_soon(self._wake)

    def _returned(self, round: int) -> None:
        if round == self._round and self._away:
            self._away -= 1
            if not self._away:
                self._round_seconds = self._loop.time() - self._round_began
