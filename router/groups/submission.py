"""Ticket: one submission on one group's stream, and the outputs that have come for it.

A link delivers, a relay takes. Whatever came since the last take comes at once, so that a slow reader gets a few large
deltas and not a queue of small ones; for one that falls too far behind nothing more is kept, nor computed. It does not
know text, and it dies with its stream.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from coatcheck.proto.errors import CoatcheckError, SlowReader
from coatcheck.proto.stubs.worker_pb2 import SequenceOutput
from coatcheck.router.groups.group_failures import GroupFailure
from coatcheck.router.groups.group_load import Submission

# Steps that may wait for a reader: some ten seconds of a fast stream, and a few megabytes where log-probabilities come.
MOST_WAITING: Final = 8192


class GroupLost(Exception):
    """The stream to the group has ended; the request can go on elsewhere. `apart`: no other suspect ran there."""

    def __init__(self, loss: GroupFailure, *, apart: bool) -> None:
        super().__init__(loss.reason)
        self.loss = loss
        self.apart = apart


class Ejected(Exception):
    """The group is not the one it should be, says what cannot be, or is too slow: its stream must end, with this as the
    reason. `pause`: for so long at least, since its slowness is all that is wrong with it; 0: it is not slow."""

    def __init__(self, message: str, *, pause: float = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class Ticket:
    """Made by a link's `submit`; the relay that holds it closes it. `round` is when its reader was last woken, 0 once
    it is back; `on_return` is told. `suspicion`: see Suspicion.level."""

    __slots__ = (
        "_abort",
        "_error",
        "_outputs",
        "_waiter",
        "attempt",
        "choices",
        "group",
        "id",
        "on_return",
        "round",
        "submission",
        "suspicion",
    )

    def __init__(
        self, group: str, id: int, attempt: int, choices: int, abort: Callable[[int, int | None], None]
    ) -> None:
        self.group = group
        self.id = id
        self.attempt = attempt
        self.choices = choices
        self.round = 0
        self.suspicion = 0
        self.submission: Submission | None = None  # the link's GroupLoad counts it
        self.on_return: Callable[[int], None] | None = None
        self._abort = abort
        self._outputs: list[SequenceOutput] = []
        self._error: GroupLost | CoatcheckError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[SequenceOutput]:
        """All that has come and was not taken yet, at least one; then raises GroupLost or the group's refusal."""
        if self.round and self.on_return is not None:
            round, self.round = self.round, 0
            self.on_return(round)
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def deliver(self, output: SequenceOutput) -> None:
        """Called by the link, once per output; `wake` follows. A finished choice is taken out of the GroupLoad here and
        not when the reader wakes, because reports that follow this output no longer contain it."""
        if output.finish_reason and self.submission is not None:
            self.submission.end_choice(output.choice)
        if len(self._outputs) < MOST_WAITING * self.choices:
            self._outputs.append(output)
        elif self._error is None:
            self._abort(self.id, None)
            self._error = SlowReader(
                f"this stream fell {MOST_WAITING} tokens behind; read it as it comes, or ask for less"
            )

    def wake(self, round: int) -> bool:
        """Called by the link: whoever waits in `take` goes on. Returns whether someone did wait."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        self.round = round
        waiter.set_result(None)
        return True

    def fail(self, error: GroupLost | CoatcheckError) -> None:
        """Called by the link: nothing more will come."""
        self._error = error
        self.wake(0)

    def abort(self, choice: int) -> None:
        """One choice is wanted no longer."""
        if self.submission is not None:
            self.submission.end_choice(choice)
        if self._error is None:
            self._abort(self.id, choice)

    def close(self, finished: bool) -> None:
        """Nobody takes any more; unless the group has finished, it is told."""
        if self._error is None and not finished:
            self._abort(self.id, None)
