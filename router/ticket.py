"""Ticket: one submission on one group's stream, and the outputs that have come for it.

A link delivers, a relay takes. Whatever came since the last take comes at once, so that a slow reader gets a few large
deltas and not a queue of small ones. It does not know text, and it dies with its stream.
"""

import asyncio
from collections.abc import Callable

from ..proto.errors import CoatcheckError
from ..proto.worker_pb2 import SequenceOutput


class GroupLost(Exception):
    """The stream to the group has ended; the request can go on elsewhere."""


class Ticket:
    """Made by a link's `submit`; the relay that holds it closes it."""

    __slots__ = ("_abort", "_error", "_outputs", "_waiter", "attempt", "group", "id")

    def __init__(self, group: str, id: int, attempt: int, abort: Callable[[int, int | None], None]) -> None:
        self.group = group
        self.id = id
        self.attempt = attempt
        self._abort = abort
        self._outputs: list[SequenceOutput] = []
        self._error: GroupLost | CoatcheckError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[SequenceOutput]:
        """All that has come and was not taken yet, at least one; then raises GroupLost or the group's refusal."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def deliver(self, output: SequenceOutput) -> None:
        """Called by the link, once per output."""
        self._outputs.append(output)
        self._wake()

    def fail(self, error: GroupLost | CoatcheckError) -> None:
        """Called by the link: nothing more will come."""
        self._error = error
        self._wake()

    def abort(self, choice: int) -> None:
        """One choice is wanted no longer."""
        if self._error is None:
            self._abort(self.id, choice)

    def close(self, finished: bool) -> None:
        """Nobody takes any more; unless the group has finished, it is told."""
        if self._error is None and not finished:
            self._abort(self.id, None)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
